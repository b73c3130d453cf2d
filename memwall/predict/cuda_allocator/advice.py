"""Advice on the CUDA allocator's settings for a run: those that reserve least, beside the default and the lower bound.

All of it is L2 of three levels of claim, a what-if: the simulated allocator under settings that nobody recorded.
"""

from typing import Literal

from msgspec import Struct

from memwall.predict.cuda_allocator.allocator_events import EventTrace
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings, format_settings
from memwall.predict.cuda_allocator.event_replay import Figures
from memwall.predict.cuda_allocator.settings_search import AllocatorChoice, search_settings
from memwall.predict.cuda_allocator.torch_releases import (
    covered_releases,
    profile_for,
)

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Both must have the same value: 2.9.1 ignores the first on CUDA, 2.13 prefers the second, later ones may drop it."""

HIP_VARIABLE = "PYTORCH_HIP_ALLOC_CONF"
"""Variable that a build of torch for ROCm reads as well, before the others (c10/core/AllocatorConfig.cpp)."""

EXPANDABLE_GUARDS = (
    "tensors shared with other processes over CUDA IPC (vllm 42609)",
    "custom all-reduce in captured CUDA graphs (torchtitan 3306)",
    "NCCL in captured CUDA graphs, in some combinations (pytorch 158029)",
    "ROCm 7.14 on gfx1201 (ROCm 6603)",
)
"""Which runs may not use expandable segments, each with the report that says so."""

_FORBIDDEN = "the run does one of the things that expandable segments break"
# A gain below the usual error of a forecast is none.
_NOTABLE_SHARE = 0.01


class AllocatorAdvice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names the settings that reserve least at the peak of a run, without retries; all figures are simulated."""

    level: Literal["L2 what-if"] = "L2 what-if"
    settings: str
    """One complete string, for both `VARIABLES`; the default settings where no others reserve notably less."""
    reserved_bytes: int
    reserved_spread_bytes: tuple[int, int]
    """Least and most of it, over guesses where the device puts segments; matters where addresses decide ties."""
    default_reserved_bytes: int
    """Reserved with nothing set."""
    lower_bound_bytes: int
    """Most bytes live at once, which no settings can beat."""
    guards: tuple[str, ...]
    """Which runs may not use these settings; none unless they turn on expandable segments."""
    guarded_settings: str
    """The best settings for such runs; the same where there are no guards."""
    guarded_reserved_bytes: int
    torch_versions: str
    """Whose allocator was simulated, and which releases can read the string."""
    num_tried: int
    notes: tuple[str, ...]

    @property
    def saved_bytes(self) -> int:
        """Returns what the settings reserve less than the default."""
        return self.default_reserved_bytes - self.reserved_bytes


def advise(
    trace: EventTrace,
    torch_version: str,
    *,
    total_bytes: int | None = None,
    default_figures: Figures | None = None,
) -> AllocatorAdvice:
    """Searches the settings for a run, with expandable segments and for runs that may not use them.

    Args:
        total_bytes: the device's whole memory.
        default_figures: those of torch's defaults, where they are known already.

    Raises:
        UsageError: the torch version cannot be read.
    """
    profile, _ = profile_for(torch_version)
    best = search_settings(trace, torch_version, total_bytes=total_bytes, default_figures=default_figures)
    guarded = best
    guards: tuple[str, ...] = ()
    if best.settings.expandable_segments and _is_notable(best):
        guards = EXPANDABLE_GUARDS
        guarded = search_settings(
            trace,
            torch_version,
            total_bytes=total_bytes,
            no_expandable_because=_FORBIDDEN,
            default_figures=best.default_figures,
        )
    text, figures = _worth_setting(best)
    guarded_text, guarded_figures = _worth_setting(guarded)
    is_default = figures is best.default_figures
    return AllocatorAdvice(
        settings=text,
        reserved_bytes=figures.reserved_peak_bytes,
        reserved_spread_bytes=(figures.reserved_peak_bytes,) * 2 if is_default else best.reserved_spread_bytes,
        default_reserved_bytes=best.default_figures.reserved_peak_bytes,
        lower_bound_bytes=best.lower_bound_bytes,
        guards=guards,
        guarded_settings=guarded_text,
        guarded_reserved_bytes=guarded_figures.reserved_peak_bytes,
        torch_versions=f"simulated for torch {covered_releases(profile)}; the string is read by 2.11 and later",
        num_tried=best.num_tried + (guarded.num_tried if guarded is not best else 0),
        notes=best.notes,
    )


def setting_lines(text: str) -> str:
    """Returns how to set both variables, as one line of a shell."""
    return " ".join(f"{name}={text}" for name in VARIABLES)


def _is_notable(choice: AllocatorChoice) -> bool:
    default_bytes = choice.default_figures.reserved_peak_bytes
    return default_bytes - choice.figures.reserved_peak_bytes > _NOTABLE_SHARE * default_bytes


def _worth_setting(choice: AllocatorChoice) -> tuple[str, Figures]:
    """Returns the settings with their figures; the default ones where the gain is too small to be one."""
    if _is_notable(choice):
        return format_settings(choice.settings), choice.figures
    return format_settings(AllocatorSettings()), choice.default_figures
