"""The threads behind `TransferPool`, and what they share with it: a queue of blocks, and the first failure."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from memwall.errors import OffloadIOError, StoreError
from memwall.store.checksum import crc32
from memwall.store.scratch import ScratchFile, Slot
from memwall.units import format_bytes

__all__ = ["Block", "Transfer", "WorkState", "run_worker", "shut_down"]

_JOIN_SECONDS = 5.0
_logger = logging.getLogger(__name__)


class Transfer:
    """Blocks under way between memory and one slot; made by `TransferPool`, waited for by the training thread."""

    __slots__ = ("_callbacks", "_pending", "_state", "is_cancelled", "label", "slot")

    def __init__(self, state: "WorkState", slot: Slot, label: str) -> None:
        self._state = state
        self._pending = 1  # the opener's own share, given up by `seal`
        self._callbacks: list[Callable[[], None]] = []
        self.slot = slot
        self.label = label
        self.is_cancelled = False

    @property
    def is_done(self) -> bool:
        """True when no block is queued or under way any more, for good or bad."""
        return self._pending == 0

    def seal(self) -> None:
        """Say that no further block will be added."""
        self._state.finish_share(self)

    def cancel(self) -> None:
        """Skip the blocks that have not begun."""
        self.is_cancelled = True

    def then(self, callback: Callable[[], None]) -> None:
        """Call `callback` once when done: now, or from the worker that finishes the last block."""
        with self._state.lock:
            if self._pending:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> float:
        """Block until done; the seconds that took.

        Raises:
            StoreError: a block of this or an earlier transfer failed (`OffloadIOError` with the place), or the disk
                finished nothing for the pool's `stall_seconds`.
        """
        seconds = self._state.wait_for(lambda: self._pending == 0)
        if self.is_cancelled:
            raise StoreError(f"the transfer of {self.label} was cancelled: the disk offload has been closed")
        return seconds


class Block:
    """One read or write. `keep` is whatever must outlive it: the buffer's owner."""

    __slots__ = ("after", "is_read", "keep", "slot_offset", "transfer", "view")

    def __init__(
        self,
        transfer: Transfer,
        slot_offset: int,
        view: memoryview,
        is_read: bool,
        keep: object,
        after: Callable[[], None] | None,
    ) -> None:
        self.transfer = transfer
        self.slot_offset = slot_offset
        self.view = view
        self.is_read = is_read
        self.keep = keep
        self.after = after


class WorkState:
    """What the workers share with the pool. They hold this and not the pool, so that a forgotten pool can die."""

    def __init__(self, scratch: ScratchFile, has_checksums: bool, stall_seconds: float) -> None:
        self.scratch = scratch
        self.has_checksums = has_checksums
        self.stall_seconds = stall_seconds
        self.lock = threading.RLock()  # reentrant: a garbage collection inside a locked region may run our callbacks
        self.work_added = threading.Condition(self.lock)
        self.work_done = threading.Condition(self.lock)
        self.blocks: deque[Block] = deque()
        self.failure: BaseException | None = None
        self.is_closing = False
        self.num_finished = 0
        self.bytes_written = 0
        self.bytes_read = 0
        self.process_id = os.getpid()

    def add_shares(self, transfer: Transfer, num_blocks: int) -> None:
        """Count blocks into `transfer`, before they are queued."""
        with self.lock:
            transfer._pending += num_blocks

    def queue(self, blocks: list[Block], *, is_urgent: bool) -> None:
        """Hand counted blocks to the workers, or drop them when the pool is closing."""
        with self.lock:
            if not self.is_closing:
                if is_urgent:
                    self.blocks.extendleft(reversed(blocks))
                else:
                    self.blocks.extend(blocks)
                self.work_added.notify(len(blocks))
                return
        self.drop(blocks)

    def drop(self, blocks: list[Block]) -> None:
        """Finish blocks without doing them."""
        for block in blocks:
            block.transfer.is_cancelled = True
            self.settle(block)

    def settle(self, block: Block) -> None:
        """Give back what `block` holds, and count it as finished."""
        try:
            if block.after is not None:
                block.after()
        finally:
            self.finish_share(block.transfer)

    def finish_share(self, transfer: Transfer) -> None:
        """Count one share of `transfer` as finished; the last one calls its callbacks."""
        callbacks: list[Callable[[], None]] = []
        with self.lock:
            transfer._pending -= 1
            self.num_finished += 1
            if transfer._pending == 0:
                callbacks, transfer._callbacks = transfer._callbacks, []
            self.work_done.notify_all()
        for callback in callbacks:
            callback()

    def wait_for(self, is_ready: Callable[[], bool]) -> float:
        """See `TransferPool.wait_for`."""
        started = time.perf_counter()
        with self.lock:
            while not is_ready():
                self.raise_failure()
                num_finished = self.num_finished
                if not self.work_done.wait(self.stall_seconds) and self.num_finished == num_finished:
                    self.failure = StoreError(
                        f"the disk behind {self.scratch.path} has finished nothing for {self.stall_seconds:.0f} s "
                        f"with {len(self.blocks) + 1} blocks waiting; look at the kernel "
                        f"log (dmesg) and give another {self.scratch.option} DIR"
                    )
            self.raise_failure()
        return time.perf_counter() - started

    def raise_failure(self) -> None:
        """Raise a fresh copy of the first failure: raising one object again and again would grow its traceback."""
        failure = self.failure
        if isinstance(failure, OffloadIOError):
            raise OffloadIOError(
                str(failure),
                path=failure.path,
                offset=failure.offset,
                wanted_bytes=failure.wanted_bytes,
                got_bytes=failure.got_bytes,
                errno=failure.errno,
            ) from failure
        if isinstance(failure, StoreError):
            raise StoreError(str(failure)) from failure
        if failure is not None:
            raise StoreError(
                f"a worker moving bytes to or from {self.scratch.path} died of {type(failure).__name__}: {failure}"
            ) from failure

    def run_block(self, block: Block) -> None:
        """Do one block, unless nobody wants it any more."""
        transfer, size = block.transfer, len(block.view)
        if transfer.is_cancelled or self.failure is not None:
            return
        if not block.is_read:
            if self.has_checksums:
                transfer.slot.checksums[block.slot_offset] = crc32(block.view)
            self.scratch.write(transfer.slot, block.slot_offset, block.view, transfer.label)
            with self.lock:
                self.bytes_written += size
            return
        self.scratch.read(transfer.slot, block.slot_offset, block.view, transfer.label)
        with self.lock:
            self.bytes_read += size
        if self.has_checksums and transfer.slot.checksums.get(block.slot_offset) != crc32(block.view):
            if transfer.slot.may_change:  # perhaps nobody wants these bytes, or who does is told
                transfer.slot.is_torn = True
                return
            offset = transfer.slot.offset + block.slot_offset
            raise OffloadIOError(
                f"{transfer.label} came back different from {self.scratch.place}: the checksum of "
                f"{format_bytes(size)} at byte {offset} does not match what was written; the disk or its cable, or the "
                f"machine's memory, loses data: check them, and give another {self.scratch.option} DIR",
                path=self.scratch.path,
                offset=offset,
                wanted_bytes=size,
                got_bytes=size,
                errno=0,
            )


def run_worker(state: WorkState) -> None:
    """The life of a worker thread."""
    while True:
        with state.lock:
            while not state.blocks and not state.is_closing:
                state.work_added.wait()
            if not state.blocks:
                return
            block = state.blocks.popleft()
        for act in (state.run_block, state.settle):
            try:
                act(block)
            except BaseException as error:  # handed to the training thread, whatever it is
                with state.lock:
                    state.failure = state.failure or error
        del block  # an idle worker must not keep a buffer alive


def shut_down(state: WorkState, threads: list[threading.Thread]) -> None:
    """End the workers and close the file; does nothing in a forked child, where neither is its own."""
    if state.process_id != os.getpid():
        return
    with state.lock:
        state.is_closing = True
        dropped = list(state.blocks)
        state.blocks.clear()
        state.work_added.notify_all()
    state.drop(dropped)
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() and thread is not threading.current_thread() for thread in threads):
        # Closing the file under a thread that is still in a write could send that write into another file.
        _logger.warning("a disk transfer in %s does not end; its scratch file stays open", state.scratch.path)
    else:
        state.scratch.close()
