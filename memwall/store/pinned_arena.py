"""Pinned host memory in the size that is used, lent in slots: what `cudaHostRegister` makes of maps of this process."""

import logging
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.backend import round_up
from memwall.store.extents import FreeExtents
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_SLOT_ALIGNMENT_BYTES = 512
_CHUNK_BYTES = 64 << 20
_HUGE_PAGE_BYTES = 2 << 20
# cudaHostRegisterPortable (cuda_runtime_api.h): pinned for every context, whichever device is current.
_PORTABLE = 1
# madvise(2), Linux 5.14: fills the pages of a map by one call, as huge ones where they are; not yet named by Python.
_MADV_POPULATE_WRITE = 23


class NoPinnedRoomError(StoreError):
    """No more host memory can be pinned; what was to go there can stay where it is."""


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
    costs milliseconds; here maps of 64 MiB or one large request are registered once and reused. A slot that comes back
    is given to the next request of its size, without a search: each step asks for the same ones.

    Args:
        limit_bytes: the most to pin; None for no limit.
        chunk_bytes: the least to register at a time; 0 for few requests that stay, each of which gets a map of its own
            in whole pages.
        device: the CUDA device in whose context the driver is asked; None for the current one.
    """

    def __init__(
        self, limit_bytes: int | None, *, chunk_bytes: int = _CHUNK_BYTES, device: torch.device | None = None
    ) -> None:
        self._limit_bytes, self._chunk_bytes, self._device = limit_bytes, chunk_bytes, device
        self._chunks: list[_Chunk] = []
        self._ready: dict[int, list[tuple[_Chunk, int]]] = {}
        """Slots that came back, by size; not in the extents of their chunks yet."""
        self.pinned_bytes = 0

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the most to pin; what is pinned stays."""
        self._limit_bytes = limit_bytes

    def allocate(self, num_bytes: int) -> PinnedSlot:
        """Returns a slot of at least `num_bytes`.

        Raises:
            NoPinnedRoomError: the limit, or the driver, does not allow it.
        """
        size = round_up(num_bytes, _SLOT_ALIGNMENT_BYTES)
        ready = self._ready.get(size)
        if ready:
            return _slot(*ready.pop(), num_bytes, size)
        found = self._found(size)
        if found is None and self._ready:
            self._settle()
            found = self._found(size)
        if found is None:
            chunk = self._add_chunk(size)
            found = chunk, chunk.free.take(size) or 0
        return _slot(*found, num_bytes, size)

    def free(self, slot: PinnedSlot) -> None:
        """Takes a slot back."""
        self._ready.setdefault(slot.num_bytes, []).append((slot.chunk, slot.offset))

    def trim(self) -> None:
        """Unpins maps in which nothing is lent. No copy may be under way there."""
        self._settle()
        for chunk in list(self._chunks):
            if chunk.free.total_bytes == chunk.memory.numel():
                self._remove_chunk(chunk)

    def close(self) -> None:
        """Unpins everything. No copy may be under way."""
        self._ready.clear()
        for chunk in list(self._chunks):
            self._remove_chunk(chunk)

    def _found(self, size: int) -> tuple[_Chunk, int] | None:
        for chunk in self._chunks:
            offset = chunk.free.take(size)
            if offset is not None:
                return chunk, offset
        return None

    def _settle(self) -> None:
        """Joins slots that came back with the free space around them."""
        for size, slots in self._ready.items():
            for chunk, offset in slots:
                chunk.free.give(offset, size)
        self._ready.clear()

    def _remove_chunk(self, chunk: _Chunk) -> None:
        with self._in_context():
            status = int(_runtime().cudaHostUnregister(chunk.memory.data_ptr()))
        if status != 0:
            _forget_refusal()
            _log.warning(
                "the CUDA driver did not unpin %s of host memory (error %d), which stays taken until the process ends",
                format_bytes(chunk.memory.numel()),
                status,
            )
        self._chunks.remove(chunk)
        self.pinned_bytes -= chunk.memory.numel()

    def _add_chunk(self, needed_bytes: int) -> _Chunk:
        page_bytes = _HUGE_PAGE_BYTES if needed_bytes >= _CHUNK_BYTES else mmap.PAGESIZE
        size = max(self._chunk_bytes, round_up(needed_bytes, page_bytes))
        if self._limit_bytes is not None:
            room_bytes = self._limit_bytes - self.pinned_bytes
            if needed_bytes > room_bytes:
                raise NoPinnedRoomError(
                    f"{format_bytes(needed_bytes)} more of pinned host memory are needed, but "
                    f"{format_bytes(self.pinned_bytes)} of the limit of {format_bytes(self._limit_bytes)} are pinned "
                    "already; raise --host"
                )
            size = min(size, room_bytes // mmap.PAGESIZE * mmap.PAGESIZE or needed_bytes)
        memory = _filled_map(size)
        with self._in_context():
            status = int(_runtime().cudaHostRegister(memory.data_ptr(), size, _PORTABLE))
        if status != 0:
            _forget_refusal()
            raise NoPinnedRoomError(
                f"the CUDA driver refuses to pin {format_bytes(size)} of host memory (error {status}) beside "
                f"{format_bytes(self.pinned_bytes)} pinned already; lower --host, or raise the locked-memory limit "
                "(ulimit -l) and the container's memory"
            )
        chunk = _Chunk(memory, FreeExtents())
        chunk.free.give(0, size)
        self._chunks.append(chunk)
        self.pinned_bytes += size
        return chunk

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        """Asks the driver as the device that the memory is for: any other would be given a context, and memory."""
        if self._device is None or self._device.type != "cuda":
            yield
            return
        with torch.cuda.device(self._device):
            yield


def _slot(chunk: _Chunk, offset: int, num_bytes: int, size: int) -> PinnedSlot:
    return PinnedSlot(chunk.memory[offset : offset + num_bytes], chunk, offset, size)


def _filled_map(num_bytes: int) -> Tensor:
    """Returns memory whose pages are there: huge ones where the system has them, which shared maps seldom get.

    A process that is forked does not have it: a page that is copied on a write would no longer be the device's.
    """
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), mmap.MADV_DONTFORK, _MADV_POPULATE_WRITE):
        with suppress(OSError):  # what the kernel does not know, it does page by page as the driver asks for them
            if advice is not None:
                memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)


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
