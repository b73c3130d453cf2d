"""A few threads that carry blocks between memory and a scratch file while training goes on.

A transfer is a set of pieces of memory, moved in blocks, in the order they were queued, urgent ones first. A checksum
of each block is taken at its write and compared at its read. The first failure makes the pool refuse all further work:
bytes that training relies on are gone, so the run must not go on with others.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable

from memwall.errors import StoreError
from memwall.store.closing import Closing
from memwall.store.scratch import ScratchFile, Slot
from memwall.store.workers import Piece, Transfer, WorkState, run_worker, shut_down

# 2 MiB is one huge page. One thread, O_DIRECT, overwriting, GB/s written | read (ext4 on a virtual disk, 2 cores under
# load): 4 KiB 0.05 | 0.05, 256 KiB 2.0 | 0.8, 1 MiB 3.1 | 1.2, 2 MiB 4.4 | 1.5, 8 MiB 5.2 | 2.5.
DEFAULT_BLOCK_BYTES = 2 << 20
_PYBUF_WRITE = 0x200
_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


def memory_at(address: int, num_bytes: int) -> memoryview:
    """Returns a writable view of raw memory, which the caller keeps alive."""
    view: memoryview = _memory_view(address, num_bytes, _PYBUF_WRITE)
    return view


class TransferPool(Closing):
    """Runs worker threads over one scratch file, which it owns and closes.

    Args:
        scratch: where the bytes go.
        num_workers: threads; two keep a disk busy, each in the kernel, while a third checks what was moved.
        block_bytes: the size of one read or write, a multiple of 4096.
        stall_seconds: how long the disk may finish nothing before the training thread gives up waiting.
    """

    def __init__(
        self,
        scratch: ScratchFile,
        *,
        num_workers: int = 3,
        block_bytes: int = DEFAULT_BLOCK_BYTES,
        stall_seconds: float = 60.0,
    ) -> None:
        self.scratch = scratch
        self.block_bytes = block_bytes
        self._state = WorkState(scratch, block_bytes, stall_seconds)
        self._threads = [
            threading.Thread(target=run_worker, args=(self._state,), name=f"memwall-disk-{index}", daemon=True)
            for index in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()
        # Runs when the pool is forgotten and at interpreter exit, before daemon threads are frozen.
        self._finalizer = weakref.finalize(self, shut_down, self._state, self._threads)

    @property
    def bytes_written(self) -> int:
        """Counts the bytes given to the disk so far, padding included."""
        return self._state.bytes_written

    @property
    def bytes_read(self) -> int:
        """Counts the bytes fetched from the disk so far, padding included."""
        return self._state.bytes_read

    def check_usable(self) -> None:
        """Returns if transfers can be begun.

        Raises:
            StoreError: one has failed, the pool is closed, or this process was forked from its own.
        """
        state = self._state
        if state.process_id != os.getpid():
            raise StoreError(
                f"the disk offload of process {state.process_id} was used in process {os.getpid()}, which was "
                "forked from it and has no transfer threads; start it after the fork, or use the spawn start method"
            )
        state.raise_failure()
        if state.is_closing:
            raise StoreError(f"the disk offload to {self.scratch.path} has been closed")

    def open_write(self, slot: Slot, label: str) -> Transfer:
        """Returns a transfer into `slot`, to which `add_write` gives blocks until it is sealed."""
        self.check_usable()
        return Transfer(self._state, slot, label)

    def add_write(
        self,
        transfer: Transfer,
        slot_offset: int,
        data: memoryview,
        *,
        keep: object = None,
        after: Callable[[], None] | None = None,
    ) -> None:
        """Queues a piece of an open write, which begins where a block does: a multiple of `block_bytes`.

        `data` must not change until `after` is called, from a worker.
        """
        self._state.add_share(transfer)
        self._state.queue(Piece(transfer, slot_offset, data, False, keep, after), is_urgent=False)

    def write(self, slot: Slot, data: memoryview, *, label: str = "a buffer", keep: object = None) -> Transfer:
        """Writes aligned `data` (at most the slot's size) into `slot`. It must not change until the transfer is done.

        Args:
            slot: where to.
            data: as many bytes as are to be written.
            label: names the bytes in an error.
            keep: the owner of the memory behind `data`.
        """
        transfer = self.open_write(slot, label)
        self._state.queue(Piece(transfer, 0, data, False, keep, None), is_urgent=False)
        return transfer

    def read(
        self,
        slot: Slot,
        buffer: memoryview,
        *,
        label: str = "a buffer",
        keep: object = None,
        after: Transfer | None = None,
        is_urgent: bool = False,
    ) -> Transfer:
        """Fills aligned `buffer` from the start of `slot`.

        Args:
            slot: must have been written in blocks of this pool's `block_bytes`.
            buffer: as many bytes as were written.
            label: names the bytes in an error.
            keep: the owner of the buffer's memory.
            after: the write that must be done first.
            is_urgent: go before everything that is queued.
        """
        self.check_usable()
        transfer = Transfer(self._state, slot, label)
        piece = Piece(transfer, 0, buffer, True, keep, None)
        if after is None or after.is_done:
            self._state.queue(piece, is_urgent=is_urgent)
        else:
            after.then(lambda: self._state.queue(piece, is_urgent=True))
        return transfer

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Blocks until `is_ready()`, asked again whenever a piece is finished."""
        self._state.wait_for(is_ready)

    def close(self) -> None:
        """Drops what is queued, ends the workers, and returns the file's space. Never raises, never hangs."""
        self._finalizer()
