"""A tier takes the bytes of a storage, and gives them back in fresh memory: `DiskTier` those of CPU tensors.

`StorageTier` is what the activation engine asks of it, and of `memwall.store.pinned_tier.PinnedTier` for CUDA tensors.
"""

import ctypes
import mmap
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.backend import ALIGNMENT_BYTES, round_up
from memwall.store.scratch import Slot
from memwall.store.transfer import TransferPool, memory_at
from memwall.store.workers import Transfer
from memwall.units import format_bytes

P = TypeVar("P")
L = TypeVar("L")


class ByteRange(NamedTuple):
    """Names bytes of a storage that are to leave, without a tensor: one for each that a step saves would cost time."""

    storage: torch.UntypedStorage
    start: int
    num_bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Returns those of a contiguous tensor."""
        return cls(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes)

    @property
    def address(self) -> int:
        """Says where they begin in memory."""
        return self.storage.data_ptr() + self.start

    @property
    def is_whole(self) -> bool:
        """Says whether the storage has no others."""
        return self.storage.nbytes() == self.num_bytes

    def tensor(self) -> Tensor:
        """Returns the bytes (uint8, one dimension), not a copy of them."""
        empty = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return empty.set_(self.storage, self.start, (self.num_bytes,), (1,))


class StorageTier(Protocol[P, L]):
    """Holds bytes away from their device. Methods are called by one thread at a time."""

    def park(self, source: ByteRange, label: str) -> P:
        """Takes `source` away; the caller lets go of it on return.

        What is returned has `num_bytes`: what it takes here.
        """

    def load(self, parked: P, *, is_urgent: bool) -> L:
        """Begins to bring the bytes back into fresh memory; may be called again and again."""

    def collect(self, load: L) -> Tensor:
        """Returns the bytes (uint8, one dimension) once all are there."""

    def discard(self, load: L) -> None:
        """Gives up a load that nobody collects."""

    def release(self, parked: P) -> None:
        """Forgets the bytes; their place may be reused."""

    def close(self) -> None:
        """Gives back what the tier itself holds."""


class StagingArena:
    """Lends page-aligned blocks that bytes wait in on their way to the disk.

    One anonymous map, so its size is exact and only blocks ever used take memory. The block given back last is given
    out first: it is still in the cache.
    """

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._map = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._owner = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(self._owner)
        self._num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._num_used = 0

    @property
    def resident_bytes(self) -> int:
        """Counts the bytes of the blocks that were in use at once: what of the map takes memory."""
        return self._num_used * self.block_bytes

    def has_free(self, within_bytes: int) -> bool:
        """Returns whether `take` would succeed, with no more than so much memory in use."""
        return bool(self._free) and (
            len(self._free) > self._num_blocks - self._num_used
            or self.resident_bytes + self.block_bytes <= within_bytes
        )

    def shrink(self) -> None:
        """Gives the memory of all blocks back to the system, if none is in use."""
        if self._num_used and len(self._free) == self._num_blocks:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._num_used = 0

    def take(self) -> int:
        """Returns the address of a free block. Raises IndexError where there is none."""
        block = self._free.popleft()
        self._num_used = max(self._num_used, self._num_blocks - len(self._free))
        return self._address + block * self.block_bytes

    def give(self, address: int) -> None:
        """Puts a block back; called by workers."""
        self._free.appendleft((address - self._address) // self.block_bytes)


class LeavingSource:
    """Keeps a source that is written from where it lies, until it is; a worker calls back."""

    __slots__ = ("_slot", "_source", "_tier")

    def __init__(self, tier: "DiskTier", source: ByteRange, slot: Slot) -> None:
        self._tier, self._slot = tier, slot
        self._source: ByteRange | None = source
        with tier.leaving_lock:
            tier.leaving_bytes += source.num_bytes

    def copy_into(self, target: Tensor) -> bool:
        """Fills `target` if all of the bytes are still here."""
        with self._tier.leaving_lock:
            source = self._source
        if source is None or not source.is_whole:
            return False
        target.copy_(source.tensor())
        return True

    def finish(self) -> None:
        """Lets go of the source: it is written, or never will be."""
        with self._tier.leaving_lock:
            source, self._source = self._source, None
            assert source is not None
            self._slot.is_torn |= not source.is_whole  # freed by `resize_`
            self._tier.leaving_bytes -= source.num_bytes


@dataclass(slots=True, eq=False)
class DiskParked:
    """Holds the place of bytes that are on disk, or on their way there."""

    num_bytes: int
    slot: Slot
    write: Transfer
    label: str
    reads: list[Transfer]
    leaving: LeavingSource | None
    """Keeps their source; None where they leave through staging memory."""


@dataclass(slots=True, eq=False)
class DiskLoad:
    """Holds bytes on their way back: `buffer` is theirs once `read` is done."""

    buffer: Tensor
    read: Transfer | None
    """Fills the buffer; None where the bytes are all there."""
    parked: DiskParked


class DiskTier:
    """Moves CPU memory to a scratch file and back.

    Going out, a storage of whole pages that are its own is written from where it lies, and stays until it is written;
    anything else is copied into staging blocks inside `park`. `park` waits where both together would take more than the
    window. Coming back, the disk writes straight into the memory that the caller will use.

    What lies there may be changed by others in the meantime: nobody asks for such bytes again, or a `StoreError` says
    so. Pages must stay mapped for as long as they are written, whatever becomes of the tensor.

    Args:
        pool: the threads and the file.
        window_bytes: memory for bytes on their way out; at least two blocks of the pool.
        owns_pages: whether the storage that begins at an address may be written from there; None copies all.

    Raises:
        StoreError: the window is too small.
    """

    def __init__(
        self, pool: TransferPool, *, window_bytes: int, owns_pages: Callable[[int], bool] | None = None
    ) -> None:
        num_blocks = window_bytes // pool.block_bytes
        if num_blocks < 2:
            raise StoreError(
                f"an offload window of {format_bytes(window_bytes)} is too small: it must hold at least two blocks of "
                f"{format_bytes(pool.block_bytes)}; raise it to "
                f"{format_bytes(2 * pool.block_bytes, rounding='up')} or more"
            )
        self._pool = pool
        self._arena = StagingArena(num_blocks, pool.block_bytes)
        self._window_bytes = window_bytes
        self._owns_pages = owns_pages
        self.leaving_bytes = 0
        """Counts the bytes of sources that are written from where they lie and are not there yet."""
        # Reentrant: a garbage collection inside may run a callback.
        self.leaving_lock = threading.RLock()

    @property
    def staging_bytes(self) -> int:
        """Counts the staging memory that is resident: of the window, what copies used so far."""
        return self._arena.resident_bytes

    def park(self, source: ByteRange, label: str) -> DiskParked:
        """Takes `source` away; one larger than the window passes through it in pieces.

        Raises:
            StoreError: no room on disk, or a transfer failed.
        """
        scratch = self._pool.scratch
        slot = scratch.allocate(source.num_bytes)
        try:
            write = self._pool.open_write(slot, label)
        except StoreError:
            scratch.free(slot)
            raise
        leaving = None
        try:
            if self._can_leave_from_there(source):
                leaving = self._let_leave(source, write)
            else:
                self._copy(source, write)
        except BaseException:
            write.cancel()
            write.then(lambda: scratch.free(slot))
            raise
        finally:
            write.seal()
        return DiskParked(num_bytes=source.num_bytes, slot=slot, write=write, label=label, reads=[], leaving=leaving)

    def _can_leave_from_there(self, source: ByteRange) -> bool:
        # Of a larger storage more would stay than is counted.
        return (
            self._owns_pages is not None
            and source.num_bytes <= self._window_bytes
            and source.num_bytes % ALIGNMENT_BYTES == 0
            and source.address % ALIGNMENT_BYTES == 0
            and source.is_whole
            and self._owns_pages(source.address)
        )

    def _let_leave(self, source: ByteRange, write: Transfer) -> LeavingSource:
        def has_room() -> bool:
            self._arena.shrink()
            return self.leaving_bytes + source.num_bytes + self._arena.resident_bytes <= self._window_bytes

        self._wait_for(has_room)
        write.slot.may_change = True
        leaving = LeavingSource(self, source, write.slot)
        try:
            self._pool.add_write(write, 0, memory_at(source.address, source.num_bytes), after=leaving.finish)
        except BaseException:
            leaving.finish()
            raise
        return leaving

    def _copy(self, source: ByteRange, write: Transfer) -> None:
        arena, num_bytes, address = self._arena, source.num_bytes, source.address
        for start in range(0, num_bytes, arena.block_bytes):
            size = min(arena.block_bytes, num_bytes - start)
            self._wait_for(lambda: arena.has_free(self._window_bytes - self.leaving_bytes))
            block = arena.take()
            ctypes.memmove(block, address + start, size)
            view = memory_at(block, round_up(size))
            self._pool.add_write(write, start, view, keep=arena, after=partial(arena.give, block))

    def _wait_for(self, is_ready: Callable[[], bool]) -> None:
        if not is_ready():
            self._pool.wait_for(is_ready)

    def load(self, parked: DiskParked, *, is_urgent: bool) -> DiskLoad:
        """Begins to bring bytes back; what is wanted at once and has not left yet is copied, before all writes."""
        self._pool.check_usable()
        padded_bytes = round_up(parked.num_bytes)
        # Where tensors lie on whole pages, these fit a hole of just their size.
        for spare_bytes in (ALIGNMENT_BYTES if parked.leaving is None else 0, ALIGNMENT_BYTES):
            memory = torch.empty(padded_bytes + spare_bytes, dtype=torch.uint8, device="cpu")
            skipped_bytes = -memory.data_ptr() % ALIGNMENT_BYTES
            if skipped_bytes <= spare_bytes:
                break
        is_whole = memory.numel() == parked.num_bytes
        buffer = memory if is_whole else memory[skipped_bytes : skipped_bytes + parked.num_bytes]
        if is_urgent and parked.leaving is not None and parked.leaving.copy_into(buffer):
            return DiskLoad(buffer=buffer, read=None, parked=parked)
        read = self._pool.read(
            parked.slot,
            memory_at(memory.data_ptr() + skipped_bytes, padded_bytes),
            label=parked.label,
            keep=memory,
            after=parked.write,
            is_urgent=is_urgent,
        )
        parked.reads = [other for other in parked.reads if not other.is_done]
        parked.reads.append(read)
        return DiskLoad(buffer=buffer, read=read, parked=parked)

    def collect(self, load: DiskLoad) -> Tensor:
        """Returns the bytes once they are all there.

        Raises:
            StoreError: the bytes cannot be had, or came back different.
        """
        if load.read is None:
            return load.buffer
        load.read.wait()
        if load.parked.slot.is_torn:
            raise StoreError(
                f"{load.parked.label} came back different from {self._pool.scratch.place}: something wrote into its "
                "memory or freed it while it was on its way, and autograd was not told (write into a copy, not into "
                "`.data`), or the disk loses data (try another --disk DIR)"
            )
        return load.buffer

    def discard(self, load: DiskLoad) -> None:
        """Gives up a load; a block that has begun keeps its memory until it is read."""
        if load.read is not None:
            load.read.cancel()

    def release(self, parked: DiskParked) -> None:
        """Frees the slot once nothing is under way in it: a late write would hit its next user."""
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
        """Gives up the staging memory, which goes when the last block in it is written."""
        del self._arena
