"""Where parked bytes live. A tier takes the bytes of a storage, and gives them back in fresh memory.

`Tier` is the interface the activation engine uses; `DiskTier` is the one for CPU tensors.
"""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.store.scratch import Slot
from memwall.store.transfer import Transfer, TransferPool, memory_at
from memwall.units import format_bytes

__all__ = ["DiskLoad", "DiskParked", "DiskTier", "StagingArena", "Tier"]

P = TypeVar("P")
L = TypeVar("L")


class Tier(Protocol[P, L]):
    """A place for bytes away from their device. Methods are called by one thread at a time."""

    stall_seconds: float
    """Time `park` waited for room, so far."""

    def park(self, source: Tensor, label: str) -> P:
        """Copy `source` (uint8, one dimension, contiguous) away; its memory may be reused on return."""

    def load(self, parked: P, *, is_urgent: bool) -> L:
        """Begin to bring the bytes back into fresh memory; may be called again and again."""

    def collect(self, load: L) -> tuple[Tensor, float]:
        """The bytes (uint8, one dimension) once they are all there, and the seconds the caller had to wait."""

    def discard(self, load: L) -> None:
        """Give up a load that nobody collects."""

    def release(self, parked: P) -> None:
        """Forget the bytes; their place may be reused."""

    def close(self) -> None:
        """Give back what the tier itself holds."""


class StagingArena:
    """A fixed number of page-aligned blocks that bytes wait in on their way to the disk.

    One anonymous map, so its size is exact and only blocks ever used take memory. The block given back last is given
    out first: it is still in the cache.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._map = mmap.mmap(-1, num_blocks * block_bytes)
        self._owner = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._owner)
        self._num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._num_used = 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of the blocks that were ever in use at once: what of the map takes memory."""
        return self._num_used * self.block_bytes

    @property
    def has_free(self) -> bool:
        """True when `take` would succeed."""
        return bool(self._free)

    def take(self) -> int:
        """The address of a free block. Raises IndexError where there is none."""
        block = self._free.popleft()
        self._num_used = max(self._num_used, self._num_blocks - len(self._free))
        return self._address + block * self.block_bytes

    def give(self, address: int) -> None:
        """Put a block back; called by workers."""
        self._free.appendleft((address - self._address) // self.block_bytes)


@dataclass(slots=True, eq=False)
class DiskParked:
    """Bytes that are on disk, or on their way there."""

    num_bytes: int
    slot: Slot
    write: Transfer
    label: str
    reads: list[Transfer]


@dataclass(slots=True, eq=False)
class DiskLoad:
    """Bytes on their way back: `buffer` is theirs once `read` is done."""

    buffer: Tensor
    read: Transfer


class DiskTier:
    """CPU memory to a scratch file and back.

    Going out, bytes are copied into a staging block inside `park`, which waits when all blocks are taken. Coming back,
    the disk writes straight into the memory that the caller will use.

    Args:
        pool: the threads and the file.
        window_bytes: staging memory; at least two blocks of the pool.

    Raises:
        StoreError: the window is too small.
    """

    def __init__(self, pool: TransferPool, *, window_bytes: int) -> None:
        num_blocks = window_bytes // pool.block_bytes
        if num_blocks < 2:
            raise StoreError(
                f"an offload window of {format_bytes(window_bytes)} is too small: it must hold at least two blocks of "
                f"{format_bytes(pool.block_bytes)}; raise it to {format_bytes(2 * pool.block_bytes)} or more"
            )
        self._pool = pool
        self._arena = StagingArena(num_blocks, pool.block_bytes)
        self.stall_seconds = 0.0

    @property
    def staging_bytes(self) -> int:
        """Staging memory that is resident: of the window, what was used so far."""
        return self._arena.resident_bytes

    def park(self, source: Tensor, label: str) -> DiskParked:
        """See `Tier`. A source larger than the window passes through it in pieces.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        pool, arena = self._pool, self._arena
        num_bytes, address = source.numel(), source.data_ptr()
        slot = pool.scratch.allocate(num_bytes)
        try:
            write = pool.open_write(slot, label)
        except StoreError:
            pool.scratch.free(slot)
            raise
        try:
            for start in range(0, num_bytes, arena.block_bytes):
                size = min(arena.block_bytes, num_bytes - start)
                if not arena.has_free:
                    self.stall_seconds += pool.wait_for(lambda: arena.has_free)
                block = arena.take()
                ctypes.memmove(block, address + start, size)
                view = memory_at(block, round_up(size))
                pool.add_write(write, start, view, keep=arena, after=_giver(arena, block))
        except BaseException:
            write.cancel()
            write.then(lambda: pool.scratch.free(slot))
            raise
        finally:
            write.seal()
        return DiskParked(num_bytes=num_bytes, slot=slot, write=write, label=label, reads=[])

    def load(self, parked: DiskParked, *, is_urgent: bool) -> DiskLoad:
        """See `Tier`."""
        padded_bytes = round_up(parked.num_bytes)
        memory = torch.empty(padded_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device="cpu")
        address = memory.data_ptr()
        skipped_bytes = round_up(address) - address
        read = self._pool.read(
            parked.slot,
            memory_at(address + skipped_bytes, padded_bytes),
            label=parked.label,
            keep=memory,
            after=parked.write,
            is_urgent=is_urgent,
        )
        parked.reads = [other for other in parked.reads if not other.is_done]
        parked.reads.append(read)
        return DiskLoad(buffer=memory[skipped_bytes : skipped_bytes + parked.num_bytes], read=read)

    def collect(self, load: DiskLoad) -> tuple[Tensor, float]:
        """See `Tier`.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        return load.buffer, load.read.wait()

    def discard(self, load: DiskLoad) -> None:
        """See `Tier`. A block that has begun keeps its memory until it is read."""
        load.read.cancel()

    def release(self, parked: DiskParked) -> None:
        """See `Tier`. The slot is free once nothing is under way in it, or a late write would hit its next user."""
        scratch, slot, waiting = self._pool.scratch, parked.slot, [parked.write, *parked.reads]

        def free_when_idle() -> None:
            while waiting:
                if not waiting[-1].is_done:
                    waiting[-1].then(free_when_idle)
                    return
                waiting.pop()
            scratch.free(slot)

        for transfer in waiting:
            transfer.cancel()
        free_when_idle()

    def close(self) -> None:
        """See `Tier`. The staging memory goes when the last block in it is written."""
        del self._arena


def _giver(arena: StagingArena, block: int) -> Callable[[], None]:
    return lambda: arena.give(block)
