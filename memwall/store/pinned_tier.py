"""CUDA memory to pinned host memory and back, on two streams of its own, without stopping the host.

Order is kept by events only. The compute stream is whatever stream is current when a method is called: forward's stream
in `park`, backward's in `load` and `collect`.
"""

import mmap
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.backend import round_up
from memwall.store.disk_tier import ByteRange
from memwall.store.extents import FreeExtents
from memwall.store.room import with_room
from memwall.units import format_bytes

__all__ = ["PinnedArena", "PinnedLoad", "PinnedParked", "PinnedSlot", "PinnedTier"]

_SLOT_ALIGNMENT_BYTES = 512
_CHUNK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20


@dataclass(slots=True, eq=False)
class _Chunk:
    """Holds one registered map. `memory` (uint8) owns it."""

    memory: Tensor
    free: FreeExtents


@dataclass(slots=True, eq=False)
class PinnedSlot:
    """Holds pinned bytes lent by an arena: `memory` (uint8, one dimension), `offset` within `chunk`."""

    memory: Tensor
    chunk: _Chunk
    offset: int
    num_bytes: int


class PinnedArena:
    """Lends pinned host memory, of which it takes exactly the size that is used.

    PyTorch's own pinned allocator rounds each request up to a power of two, and asking the driver for every tensor
    costs milliseconds; here maps of 64 MiB or one large request are registered once and reused.

    Args:
        limit_bytes: the most to pin; None for no limit.
        chunk_bytes: the least to register at a time; 0 for few requests that stay, each of which gets a map of its own
            in whole pages.
    """

    def __init__(self, limit_bytes: int | None, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._limit_bytes, self._chunk_bytes = limit_bytes, chunk_bytes
        self._chunks: list[_Chunk] = []
        self.pinned_bytes = 0

    def allocate(self, num_bytes: int) -> PinnedSlot:
        """Returns a slot of at least `num_bytes`.

        Raises:
            StoreError: the limit, or the driver, does not allow it.
        """
        size = round_up(num_bytes, _SLOT_ALIGNMENT_BYTES)
        for chunk in self._chunks:
            offset = chunk.free.take(size)
            if offset is not None:
                return PinnedSlot(chunk.memory[offset : offset + num_bytes], chunk, offset, size)
        chunk = self._add_chunk(size)
        offset = chunk.free.take(size) or 0
        return PinnedSlot(chunk.memory[offset : offset + num_bytes], chunk, offset, size)

    def free(self, slot: PinnedSlot) -> None:
        """Takes a slot back."""
        slot.chunk.free.give(slot.offset, slot.num_bytes)

    def trim(self) -> None:
        """Unpins maps in which nothing is lent. No copy may be under way there."""
        for chunk in list(self._chunks):
            if chunk.free.total_bytes == chunk.memory.numel():
                self._remove_chunk(chunk)

    def close(self) -> None:
        """Unpins everything. No copy may be under way."""
        for chunk in list(self._chunks):
            self._remove_chunk(chunk)

    def _remove_chunk(self, chunk: _Chunk) -> None:
        _runtime().cudaHostUnregister(chunk.memory.data_ptr())
        self._chunks.remove(chunk)
        self.pinned_bytes -= chunk.memory.numel()

    def _add_chunk(self, needed_bytes: int) -> _Chunk:
        page_bytes = _HUGE_PAGE_BYTES if needed_bytes >= _CHUNK_BYTES else mmap.PAGESIZE
        size = max(self._chunk_bytes, round_up(needed_bytes, page_bytes))
        if self._limit_bytes is not None:
            room_bytes = self._limit_bytes - self.pinned_bytes
            if needed_bytes > room_bytes:
                raise StoreError(
                    f"{format_bytes(needed_bytes)} more of pinned host memory are needed, but "
                    f"{format_bytes(self.pinned_bytes)} of the limit of {format_bytes(self._limit_bytes)} are pinned "
                    "already; raise --host"
                )
            size = min(size, room_bytes // mmap.PAGESIZE * mmap.PAGESIZE or needed_bytes)
        memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        status = int(_runtime().cudaHostRegister(memory.data_ptr(), size, 0))
        if status != 0:
            _forget_refusal()
            raise StoreError(
                f"the CUDA driver refuses to pin {format_bytes(size)} of host memory (error {status}) beside "
                f"{format_bytes(self.pinned_bytes)} pinned already; lower --host, or raise the locked-memory limit "
                "(ulimit -l) and the container's memory"
            )
        chunk = _Chunk(memory, FreeExtents())
        chunk.free.give(0, size)
        self._chunks.append(chunk)
        self.pinned_bytes += size
        return chunk


@dataclass(slots=True, eq=False)
class PinnedParked:
    """Holds bytes in pinned memory once `copied` has happened, and `source` while they may be under way."""

    host: PinnedSlot
    copied: torch.cuda.Event
    source: Tensor | None
    num_bytes: int
    last_read: torch.cuda.Event | None = None


@dataclass(slots=True, eq=False)
class PinnedLoad:
    """Holds bytes in `buffer` once `ready` has happened; None: they never left."""

    buffer: Tensor
    ready: torch.cuda.Event | None


def _runtime() -> Any:
    return torch.cuda.cudart()


def _forget_refusal() -> None:
    """Has the CUDA runtime forget a refused call, which torch would raise at its next kernel, whoever launches that.

    Its check of a launch asks for the last error of any call, which forgets it (torch 2.13, c10/cuda/CUDAException.h);
    what registers memory leaves it there, and no binding asks for it alone (torch/csrc/cuda/shared/cudart.cpp).
    """
    if torch.cuda.is_initialized():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


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
        self._arena = PinnedArena(limit_bytes)
        self._leaving: dict[PinnedParked, None] = {}
        self._leaving_bytes = 0
        self.stall_seconds = 0.0

    def park(self, source: ByteRange, label: str) -> PinnedParked:
        tensor = source.tensor()
        compute = torch.cuda.current_stream(self._device)
        host = self._arena.allocate(source.num_bytes)
        self._outward.wait_stream(compute)
        with torch.cuda.stream(self._outward):
            host.memory.copy_(tensor, non_blocking=True)
        copied = self._outward.record_event()
        parked = PinnedParked(host=host, copied=copied, source=tensor, num_bytes=source.num_bytes)
        self._leaving[parked] = None
        self._leaving_bytes += parked.num_bytes
        while self._leaving_bytes > self._window_bytes:
            oldest = next(iter(self._leaving))
            compute.wait_event(oldest.copied)
            self._let_go(oldest)
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

    def collect(self, load: PinnedLoad) -> tuple[Tensor, float]:
        """Returns the bytes; the compute stream waits for them, the host does not: 0 seconds."""
        if load.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(load.ready)
        return load.buffer, 0.0

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
        if parked in self._leaving:
            del self._leaving[parked]
            self._leaving_bytes -= parked.num_bytes
            parked.source = None
