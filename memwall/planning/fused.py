"""What a step recorded with fused kernels says about them: where they are, and what they save and cost."""

import msgspec

from memwall.planning.actions import FusedKernels
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.trace.build import steady_step
from memwall.trace.records import Trace

__all__ = ["could_have_kernels", "kernels_compared", "kernels_in"]

_OWN = "memwall."
_LOSS = "memwall.linear_cross_entropy"
# What norms, gated MLPs and the loss of a language model are made of where no fused kernel computes them.
_PARTS = frozenset(
    f"aten.{name}.default" for name in ("rsqrt", "native_layer_norm", "_fused_rms_norm", "silu", "gelu", "_log_softmax")
)


def could_have_kernels(trace: Trace) -> bool:
    """Whether a step has operators that fused kernels may stand in for; recording it with them tells."""
    return not _PARTS.isdisjoint(trace.names) and not any(name.startswith(_OWN) for name in trace.names)


def kernels_in(trace: Trace, chunk_rows: int) -> FusedKernels | None:
    """The action that makes a model run the fused kernels that were seen in a recorded step; None where none ran.

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


def kernels_compared(action: FusedKernels, plain: Trace, fused: Trace) -> FusedKernels:
    """The action with what it takes off the peak of a step that nothing else treats, and adds to its seconds."""
    before, after = steady_step(plain), steady_step(fused)
    saved_bytes = live_peak_bytes(before, plain.device) - live_peak_bytes(after, fused.device)
    return msgspec.structs.replace(
        action, saved_bytes=saved_bytes, cost_seconds=step_seconds(after) - step_seconds(before)
    )
