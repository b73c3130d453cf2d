"""CUDA memory to pinned host memory and back, on two streams of its own, without stopping the host.

Order is kept by events only. The compute stream is whatever stream is current when a method is called: forward's stream
in `park`, backward's in `load` and `collect`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from memwall.store.disk_tier import ByteRange
from memwall.store.pinned_arena import PinnedArena, PinnedSlot
from memwall.store.room import with_room


@dataclass(slots=True, eq=False)
class PinnedParked:
    """Holds bytes in pinned memory once `copied` has happened, and `source` while they may be under way."""

    host: PinnedSlot
    copied: torch.cuda.Event
    source: Tensor | None
    num_bytes: int
    owner: torch.cuda.Stream
    """The stream on which `source` is used, and its memory given to others."""
    last_read: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class PinnedLoad:
    """Holds bytes in `buffer` once `ready` has happened; None: they never left."""

    buffer: Tensor
    ready: torch.cuda.Event | None


class PinnedTier:
    """Holds bytes of one CUDA device in pinned host memory.

    A source is held until its copy is known to be ordered before whatever reuses its memory. Its release is decided by
    the program's order, not by polling, so that the device's peak is the same in every step: when more than the window
    is under way, the compute stream itself waits for the oldest copy. `record_stream` is not used: it delays reuse
    without a bound.

    Args:
        device: a CUDA device.
        window_bytes: the most bytes of sources held for copies under way.
        limit_bytes: the most pinned host memory; None for no limit.
    """

    def __init__(self, device: torch.device, *, window_bytes: int, limit_bytes: int | None) -> None:
        self._device = device
        self._window_bytes = window_bytes
        self._outward = torch.cuda.Stream(device)
        self._inward = torch.cuda.Stream(device)
        self._arena = PinnedArena(limit_bytes, device=device)
        self._leaving: dict[PinnedParked, None] = {}
        self._leaving_bytes = 0

    def park(self, source: ByteRange, label: str) -> PinnedParked:
        tensor = source.tensor()
        compute = torch.cuda.current_stream(self._device)
        host = self._arena.allocate(source.num_bytes)
        self._outward.wait_stream(compute)
        with torch.cuda.stream(self._outward):
            host.memory.copy_(tensor, non_blocking=True)
        copied = self._outward.record_event()
        parked = PinnedParked(host=host, copied=copied, source=tensor, num_bytes=source.num_bytes, owner=compute)
        self._leaving[parked] = None
        self._leaving_bytes += parked.num_bytes
        while self._leaving_bytes > self._window_bytes:
            self._let_go(next(iter(self._leaving)))
        return parked

    def load(self, parked: PinnedParked, *, is_urgent: bool) -> PinnedLoad:
        """Begins to bring bytes back; what has not been let go yet is given back as it is."""
        if parked.source is not None:
            return PinnedLoad(buffer=parked.source, ready=None)
        compute = torch.cuda.current_stream(self._device)
        # Allocated for the compute stream, whose earlier kernels may still use this memory: the copy waits for them.
        buffer = with_room(lambda: torch.empty(parked.num_bytes, dtype=torch.uint8, device=self._device))
        self._inward.wait_stream(compute)
        self._inward.wait_event(parked.copied)
        with torch.cuda.stream(self._inward):
            buffer.copy_(parked.host.memory, non_blocking=True)
        ready = self._inward.record_event()
        parked.last_read = ready
        return PinnedLoad(buffer=buffer, ready=ready)

    def collect(self, load: PinnedLoad) -> Tensor:
        """Returns the bytes; the compute stream waits for them, the host does not."""
        if load.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(load.ready)
        return load.buffer

    def discard(self, load: PinnedLoad) -> None:
        """Gives up a load: the buffer's next user on the compute stream must come after the copy into it."""
        if load.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(load.ready)

    def release(self, parked: PinnedParked) -> None:
        """Forgets the bytes. Copies out are in order on one stream; it only has to wait for reads of the slot."""
        if parked.last_read is not None:
            self._outward.wait_event(parked.last_read)
        self._let_go(parked)
        self._arena.free(parked.host)

    def close(self) -> None:
        self._outward.synchronize()
        self._inward.synchronize()
        self._arena.close()

    def _let_go(self, parked: PinnedParked) -> None:
        """Drops a source: what is given its memory comes after the copy, which may be under way."""
        if parked in self._leaving:
            parked.owner.wait_event(parked.copied)
            del self._leaving[parked]
            self._leaving_bytes -= parked.num_bytes
            parked.source = None
