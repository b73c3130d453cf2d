"""Whether there is a tier below the memory that a step runs in."""

from memwall.trace.records import Trace

__all__ = ["can_offload"]


def can_offload(trace: Trace) -> str | None:
    """Returns None if bytes can leave the device for the next tier, else why not."""
    if trace.device == "cpu" and not trace.machine.disk:
        return "there is no disk to move saved tensors to; pass --disk DIR"
    if trace.device != "cpu" and not trace.machine.disk_write_bytes_per_second:
        return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"
    return None
