"""Whether an optimizer's state can be on the next tier between steps."""

from memwall.trace.optimizers import JOINT, STEPPED_ALONE
from memwall.trace.records import Trace
from memwall.units import format_bytes

__all__ = ["can_move_optimizer_state"]


def can_move_optimizer_state(trace: Trace, state_bytes: int, capacity_bytes: int) -> str | None:
    """Returns None if the optimizer's state can be on the next tier between steps, else why not.

    Args:
        state_bytes: bytes of state that are in tensors large enough to move.
        capacity_bytes: bytes that the tier may be used for.
    """
    if trace.device not in ("cpu", "cuda"):
        return f"optimizer state moves from CPU and CUDA memory only; the trace is of device '{trace.device}'"
    if trace.machine.next_tier is None:
        if trace.device == "cuda":
            return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"
        return "there is no disk to move optimizer state to; pass --disk DIR"
    if JOINT in trace.optimizer:
        return f"several optimizers step the model ({trace.optimizer}), and their state stays in memory"
    if trace.optimizer not in STEPPED_ALONE:
        return f"{trace.optimizer or 'the optimizer'} is not known to step each parameter alone"
    if state_bytes == 0:
        return f"{trace.optimizer} has no state that is large enough to move"
    if state_bytes > capacity_bytes:
        tier = "disk" if trace.device == "cpu" else "host memory"
        return f"the state needs {format_bytes(state_bytes)} of {tier}, there are {format_bytes(capacity_bytes)}"
    return None
