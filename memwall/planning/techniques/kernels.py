"""Fused kernels: RMSNorms, gated MLPs and a language model's loss each run as one operation, which keeps less."""

from collections.abc import Sequence
from importlib.util import find_spec

import msgspec

from memwall.planning.action import Action, Exactness
from memwall.planning.settings import Settings
from memwall.planning.technique import Recording, Technique
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step

_OWN = "memwall."
_LOSS = "memwall.linear_cross_entropy"
# What RMSNorms, gated MLPs and the loss of a language model are made of where no fused kernel computes them.
_PARTS = frozenset(f"aten.{name}.default" for name in ("rsqrt", "_fused_rms_norm", "silu", "gelu", "_log_softmax"))


class FusedKernels(Action, frozen=True, kw_only=True, tag="kernels"):
    """Runs fused kernels in place of modules' own forwards, and the loss of a language model without its logits."""

    modules: tuple[str, ...]
    """Paths of the norms and gated MLPs whose forward is replaced."""
    chunk_rows: int = 0
    """Rows of logits that the loss holds at a time; 0 where it is left as it is."""
    exactness: Exactness = "equivalent"


class _Kernels(Technique[FusedKernels]):
    record = FusedKernels
    order = 31
    allow = "kernels"
    allow_means = "fused kernels may stand in for RMSNorms, gated MLPs and losses; they round at other points"
    allow_exactness = "equivalent"
    advice_rank = 3
    way_out_rank = 1
    is_seen_recorded = True
    keeps_parameters = "fused kernels read them outside their modules' own calls"

    def advice(self, trace: Trace, allow: tuple[str, ...], *, can_split: bool) -> str | None:
        is_possible = could_have_kernels(trace) and can_use_kernels(trace.device, (self.allow,), is_here=True) is None
        if not is_possible or self.allow in allow:
            return None
        return "allow fused kernels for RMSNorms, gated MLPs and the loss of a language model: --allow kernels"

    def way_out(self, found: Recording) -> tuple[str, Recording] | None:
        settings = found.settings
        if not could_have_kernels(found.trace) or self.allow in settings.allow:
            return None
        allowed = msgspec.structs.replace(settings, allow=(*settings.allow, self.allow))
        fused = self.recording_where_it_costs(found.trace, allowed)
        return None if fused is None else ("fused kernels, which round at other points: --allow kernels", fused)

    def recording_where_it_costs(self, trace: Trace, settings: Settings) -> Recording | None:
        recordings = settings.recordings
        if recordings is None or self.allow not in recordings.offered:
            return None
        if can_use_kernels(trace.device, settings.allow, is_here=settings.hardware is None) is not None:
            return None
        fused, found, others = recordings.take(self.allow)
        if not isinstance(found, FusedKernels):
            return None
        changed = settings.with_standing(FusedKernels, _compared(found, trace, fused))
        return Recording(fused, msgspec.structs.replace(changed, recordings=others))

    def what(self, action: FusedKernels) -> str:
        return f"fused kernels, logits {action.chunk_rows:,} rows at a time" if action.chunk_rows else "fused kernels"

    def where(self, actions: Sequence[FusedKernels]) -> str:
        modules = sum(len(action.modules) for action in actions)
        places = [f"{modules} modules"] if modules else []
        return ", ".join((*places, "loss") if any(action.chunk_rows for action in actions) else places)

    def lever(self, action: FusedKernels) -> str:
        return "fused kernels"


TECHNIQUE = _Kernels()


def can_use_kernels(device: str, allow: tuple[str, ...], *, is_here: bool) -> str | None:
    """Returns None if modules may run fused kernels, else why not.

    Args:
        is_here: whether the step will run in this installation, and not on a device that is planned for from afar.
    """
    if "kernels" not in allow:
        return "fused kernels round at other points; allow it with --allow kernels"
    if is_here and device != "cpu" and find_spec("triton") is None:
        return f"fused kernels on device '{device}' need triton, which is not installed"
    return None


def could_have_kernels(trace: Trace) -> bool:
    """Tells whether a step has operators that fused kernels may stand in for; recording it with them shows it."""
    return not _PARTS.isdisjoint(trace.names) and not any(name.startswith(_OWN) for name in trace.names)


def kernels_in(trace: Trace, chunk_rows: int) -> FusedKernels | None:
    """Returns the action that makes a model run the fused kernels seen in a recorded step; None where none ran.

    Args:
        chunk_rows: rows of logits that the loss held at a time, if it was computed without them.
    """
    step = steady_step(trace)
    modules: set[str] = set()
    has_loss = False
    for op in step.ops:
        name = trace.names[op.name]
        if op.phase == "backward" or not name.startswith(_OWN):
            continue
        if name.startswith(_LOSS):
            has_loss = True
        elif op.module >= 0:
            modules.add(trace.modules[op.module].path)
    if not modules and not has_loss:
        return None
    return FusedKernels(modules=tuple(sorted(modules)), chunk_rows=chunk_rows if has_loss else 0)


def _compared(action: FusedKernels, plain: Trace, fused: Trace) -> FusedKernels:
    """Returns the action with what it takes off the peak of an untreated step, and adds to its seconds."""
    before, after = steady_step(plain), steady_step(fused)
    saved_bytes = live_peak_bytes(before, plain.device) - live_peak_bytes(after, fused.device)
    return msgspec.structs.replace(
        action, saved_bytes=saved_bytes, cost_seconds=step_seconds(after) - step_seconds(before)
    )
