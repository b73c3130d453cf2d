"""Which allocator settings reserve least for a given sequence of events: a search by replay, from the trace alone.

The order is: expandable segments and their granule; without them, which blocks are never split.
"""

from collections.abc import Iterator, Sequence

from msgspec import Struct

from memwall.predict.cuda_allocator.addresses import AddressOrder, placed_addresses
from memwall.predict.cuda_allocator.allocator_events import ALLOC, EventTrace, live_peak_bytes
from memwall.predict.cuda_allocator.allocator_settings import MIB, AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Figures, replay
from memwall.predict.cuda_allocator.state import PeakExceeded
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for

_LARGE_SEGMENTS_MIB = (20, 12, 32, 64, 128)
_SPLIT_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
# Without one torch takes 20 MiB.
_ROUNDINGS_MIB = (None, 64, 256)
_ADDRESS_ORDERS: tuple[AddressOrder, ...] = ("ascending", "descending", "random")
_NOTABLE_EXCESS = 0.05


class AllocatorChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds settings with their simulated figures, beside the defaults and what no settings can beat."""

    settings: AllocatorSettings
    figures: Figures
    default_figures: Figures
    lower_bound_bytes: int
    """Most bytes live at once."""
    reserved_spread_bytes: tuple[int, int]
    """Least and most that may be reserved at the peak, over guesses where the device puts segments."""
    num_tried: int
    notes: tuple[str, ...]
    """Sentences on what was assumed, refused or left out."""


class _Candidate(Struct, frozen=True):
    settings: AllocatorSettings
    figures: Figures

    @property
    def rank(self) -> tuple[int, ...]:
        """Orders by bytes reserved, device calls, bytes in blocks; less is better."""
        figures = self.figures
        return (figures.reserved_peak_bytes, figures.num_steady_device_calls, figures.allocated_peak_bytes)


class _Search:
    """Replays the events on the device, and counts how often."""

    def __init__(self, trace: EventTrace, profile: VersionProfile, total_bytes: int | None) -> None:
        self.trace = trace
        self.profile = profile
        self.total_bytes = total_bytes
        self.num_tried = 0

    def run(
        self,
        settings: AllocatorSettings,
        *,
        abort_above_bytes: int | None = None,
        addresses: Iterator[int] | None = None,
        known: Figures | None = None,
    ) -> _Candidate:
        self.num_tried += 1
        figures = known or replay(
            self.trace,
            settings,
            self.profile,
            total_bytes=self.total_bytes,
            addresses=addresses,
            abort_above_bytes=abort_above_bytes,
        )
        return _Candidate(settings, figures)

    def best(self, incumbent: _Candidate, others: Sequence[AllocatorSettings]) -> _Candidate:
        """Returns the best of the incumbent and these; equal ones lose to what came before."""
        for settings in others:
            bound = incumbent.figures.reserved_peak_bytes
            try:
                found = self.run(settings, abort_above_bytes=bound)
            except PeakExceeded:
                continue
            if found.rank < incumbent.rank:
                incumbent = found
        return incumbent


def search_settings(
    trace: EventTrace,
    torch_version: str,
    *,
    total_bytes: int | None = None,
    no_expandable_because: str = "",
    default_figures: Figures | None = None,
) -> AllocatorChoice:
    """Finds the settings with the least peak of reserved memory, then the fewest device calls.

    The device's memory does not bound the replays: what reserves least without retries needs none on a smaller device
    either, and the figures of all settings stay comparable.

    Args:
        total_bytes: the device's whole memory.
        no_expandable_because: why expandable segments are out of the question here, such as tensors that are shared
            over CUDA IPC, custom all-reduce or NCCL in captured graphs, or an affected ROCm device; "" if they are not.
        default_figures: those of torch's defaults, where the same events were replayed on such a device already.

    Raises:
        UsageError: the torch version cannot be read.
    """
    profile, note = profile_for(torch_version)
    notes = [note] if note else []
    search = _Search(trace, profile, total_bytes)
    default = search.run(AllocatorSettings(), known=default_figures)
    best = default
    if no_expandable_because:
        notes.append(f"expandable segments were not tried: {no_expandable_because}")
    else:
        best = search.best(best, _expandable_settings())
    best = search.best(best, _split_settings(trace))
    lower_bound_bytes = live_peak_bytes(trace)
    excess = best.figures.reserved_peak_bytes / max(lower_bound_bytes, 1) - 1
    if excess > _NOTABLE_EXCESS:
        notes.append(
            f"{excess:.0%} above the most bytes live at once: settings alone do not close this gap, "
            "separate pools by lifetime might"
        )
    num_tried = search.num_tried
    spread = _spread(search, best)
    if profile.tie == "address":
        notes.append(
            f"torch {profile.version} decides ties by address: where the device puts segments is guessed, three ways"
        )
    notes.append("assumed: the same requests, and cross-stream uses over when they were in the recording")
    return AllocatorChoice(
        settings=best.settings,
        figures=best.figures,
        default_figures=default.figures,
        lower_bound_bytes=lower_bound_bytes,
        reserved_spread_bytes=spread,
        num_tried=num_tried,
        notes=tuple(notes),
    )


def _expandable_settings() -> list[AllocatorSettings]:
    return [AllocatorSettings(expandable_segments=True, large_segment_bytes=mib * MIB) for mib in _LARGE_SEGMENTS_MIB]


def _split_settings(trace: EventTrace) -> list[AllocatorSettings]:
    """Returns limits of splitting at quantiles of the sizes above the large segment, in whole MiB."""
    smallest = AllocatorSettings().large_segment_bytes
    sizes = sorted({nbytes for action, _, nbytes, _ in trace.events if action == ALLOC and nbytes > smallest})
    if not sizes:
        return []
    limits = sorted({-(-sizes[int(share * (len(sizes) - 1))] // MIB) for share in _SPLIT_QUANTILES} | {smallest // MIB})
    return [
        AllocatorSettings(
            max_split_bytes=limit * MIB, max_non_split_rounding_bytes=None if rounding is None else rounding * MIB
        )
        for limit in limits
        for rounding in _ROUNDINGS_MIB
    ]


def _spread(search: _Search, best: _Candidate) -> tuple[int, int]:
    """Returns the peaks of reserved memory over the guesses of addresses; one figure where addresses decide nothing."""
    if search.profile.tie != "address":
        return (best.figures.reserved_peak_bytes, best.figures.reserved_peak_bytes)
    guesses = [search.run(best.settings, addresses=placed_addresses(order)) for order in _ADDRESS_ORDERS]
    peaks = [guess.figures.reserved_peak_bytes for guess in guesses]
    return (min(peaks), max(peaks))
