"""The menu of a block as records, and what its prices are made from."""

from msgspec import Struct

from memwall.planning.solver.instance import Link, Option
from memwall.predict.call_rules import BlockCalls, Treatment

WINDOW_BYTES = 32 << 20
"""The least memory for bytes on their way out. Smaller makes the computing thread wait, larger costs memory."""
MIN_MOVED_BYTES = 1 << 20
"""Smaller saved tensors stay where they are."""
_RECORDED_MIN_BYTES = 256 << 10


def recorded_min_bytes(device: str) -> int:
    """Returns the size from which on saved tensors leave while a step is recorded on a kind of device.

    On a CPU smaller ones leave than under plans, which run blocks again instead: many layers save as much in them.
    """
    return _RECORDED_MIN_BYTES if device == "cpu" else MIN_MOVED_BYTES


class Costs(Struct, frozen=True, kw_only=True):
    """Holds what a treatment costs the computing thread, besides waiting for the link."""

    copy_seconds_per_byte: float
    """Out and back together: a copy into staging, or what transfers beside it cost, and page faults of what returns."""
    min_bytes: int
    """Tensors below this are not moved."""
    pack_seconds_per_element: float | None = None
    """For floating-point numbers that leave in a byte each, out and back; None where they may not."""
    runs_ahead: bool = False
    """Whether operations run on a device behind the host, whose own work is hidden as long as the device is busy."""
    link: Link | None = None
    """The way to the next tier; None where nothing moves."""
    lost: tuple[tuple[str, str], ...] = ()
    """Actions, by tag and block, that a run found to change the training: they are not offered again."""
    num_passes: int = 1
    """Times a step runs the recorded calls: micro-batches that each recompute and move anew. The seconds of operations
    are those of all passes together."""


class Menu(Struct, frozen=True, kw_only=True):
    """Holds a block's options as the solver sees them, and as the executor applies them; same order."""

    block: BlockCalls
    options: tuple[Option, ...]
    treatments: tuple[Treatment | None, ...]
    op_names: tuple[str, ...]
    """Operations of one call, in the numbering that selective checkpointing uses."""
    freed_bytes: tuple[int, ...]
    """Bytes that each option takes off the device between the block's forward and its backward."""
    window_bytes: int = WINDOW_BYTES
    """Memory for bytes on their way out, where an option moves any."""
