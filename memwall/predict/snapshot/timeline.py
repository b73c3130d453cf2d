"""A snapshot's history as curves: allocated, active and reserved bytes, and what lies free between used blocks."""

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from memwall.predict.snapshot.device_history import DeviceHistory, replayed
from memwall.predict.snapshot.device_memory import MemoryState

_MOST_BYTES = 1 << 62


class Fragmentation(Struct, frozen=True, kw_only=True):
    """Says how the device memory of one moment is used; the parts add up to `reserved_bytes`."""

    reserved_bytes: int
    allocated_bytes: int
    """Bytes in blocks of tensors."""
    pending_bytes: int
    """Freed by the program, still in use by another stream."""
    split_free_bytes: int
    """Free in segments that are partly in use: torch's inactive_split. No other process can have it."""
    expandable_free_bytes: int
    """Free in mapped expandable segments; whole granules of it can be unmapped."""
    idle_bytes: int
    """Segments without a used block: `empty_cache` would return them."""

    @property
    def active_bytes(self) -> int:
        """Returns the allocated and the pending bytes."""
        return self.allocated_bytes + self.pending_bytes

    @property
    def stranded_bytes(self) -> int:
        """Returns what is free, and held by blocks in use around it."""
        return self.split_free_bytes + self.expandable_free_bytes


class Timeline(Struct, frozen=True, kw_only=True):
    """Holds bytes after each event, [num_events + 1]; number 0 is before the first."""

    device: int
    recording: DeviceHistory
    """The history that was replayed."""
    allocated_bytes: NDArray[np.int64]
    active_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    split_free_bytes: NDArray[np.int64]
    expandable_free_bytes: NDArray[np.int64]
    idle_bytes: NDArray[np.int64]
    num_unmatched: int
    """Events that do not fit what was before them; more than a few mean that parts of the history are missing."""

    @property
    def active_peak(self) -> int:
        """Returns where most bytes are in use, the first of equals."""
        return int(self.active_bytes.argmax())

    @property
    def reserved_peak(self) -> int:
        """Returns where most bytes are held; of equals the one with most in use: a new segment is empty at first."""
        most_held = self.reserved_bytes == self.reserved_bytes.max()
        return int(np.where(most_held, self.active_bytes, -1).argmax())

    def fragmentation(self, position: int) -> Fragmentation:
        """Returns the memory after `position` events."""
        return Fragmentation(
            reserved_bytes=int(self.reserved_bytes[position]),
            allocated_bytes=int(self.allocated_bytes[position]),
            pending_bytes=int(self.active_bytes[position] - self.allocated_bytes[position]),
            split_free_bytes=int(self.split_free_bytes[position]),
            expandable_free_bytes=int(self.expandable_free_bytes[position]),
            idle_bytes=int(self.idle_bytes[position]),
        )


def timeline_of(recording: DeviceHistory) -> Timeline:
    """Replays a recording from its start to its end."""
    rows = np.zeros((len(recording.events) + 1, 6), dtype=np.int64)
    for number, state in enumerate(replayed(recording)):
        rows[number] = _row(state)
    allocated, active, reserved, split_free, expandable_free, idle = rows.T
    return Timeline(
        device=recording.device,
        recording=recording,
        allocated_bytes=allocated,
        active_bytes=active,
        reserved_bytes=reserved,
        split_free_bytes=split_free,
        expandable_free_bytes=expandable_free,
        idle_bytes=idle,
        num_unmatched=recording.num_unmatched + state.num_unmatched,
    )


def _row(state: MemoryState) -> tuple[int, ...]:
    levels = (
        state.allocated_bytes,
        state.active_bytes,
        state.reserved_bytes,
        state.split_free_bytes,
        state.expandable_free_bytes,
        state.idle_bytes,
    )
    # Sizes come from a file; those of a hostile one may add up to more than an array can hold.
    return tuple(min(level, _MOST_BYTES) for level in levels)
