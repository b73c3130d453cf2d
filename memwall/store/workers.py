"""The threads behind `TransferPool`, and what they share with it: a queue of pieces, and the first failure.

The training thread queues a piece as a whole and sleeps until what it waits for is so: its Python code runs with cold
caches, between operations that fill them. Cutting, checking and counting blocks is done here, while it computes.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from memwall.errors import OffloadIOError, StoreError
from memwall.store.checksum import crc32
from memwall.store.scheduling import schedule_as_batch
from memwall.store.scratch import ScratchFile, Slot
from memwall.units import format_bytes

_JOIN_SECONDS = 5.0
LOOK_SECONDS = 1.0
"""Most seconds of a wait for the disk that are counted at a time, however long it takes by the clock: while a process
is suspended (Ctrl-Z, a paused container) its disk threads do nothing either."""
# To wake a thread costs the one that wakes it 50 us on a virtual machine, where a core that idles has to be called from
# its host. So for a while after work one worker looks for more by itself, and the training thread need not wake it.
_LOOK_SECONDS, _MAX_LOOKS = 0.002, 25
_logger = logging.getLogger(__name__)


class Transfer:
    """Counts the pieces under way between memory and one slot; made by `TransferPool`, waited for by who trains."""

    __slots__ = ("_callbacks", "_pending", "_state", "is_cancelled", "label", "slot")

    def __init__(self, state: "WorkState", slot: Slot, label: str) -> None:
        self._state = state
        self._pending = 1  # the share of its only piece, or the opener's own, given up by `seal`
        self._callbacks: list[Callable[[], None]] = []
        self.slot = slot
        self.label = label
        self.is_cancelled = False

    @property
    def is_done(self) -> bool:
        """Says whether nothing is queued or under way any more, for good or bad."""
        return self._pending == 0

    def seal(self) -> None:
        """Says that no further piece will be added."""
        self._state.finish_share(self)

    def cancel(self) -> None:
        """Skips the blocks that have not begun."""
        self.is_cancelled = True

    def then(self, callback: Callable[[], None]) -> None:
        """Calls `callback` once when done: now, or from the worker that finishes the last piece."""
        with self._state.lock:
            if self._pending:
                self._callbacks.append(callback)
                return
        callback()

    def wait(self) -> None:
        """Blocks until done.

        Raises:
            StoreError: a block of this or an earlier transfer failed (`OffloadIOError` with the place), or the disk
                finished nothing for the pool's `stall_seconds`.
        """
        self._state.wait_for(lambda: self._pending == 0)
        if self.is_cancelled:
            raise StoreError(f"the transfer of {self.label} was cancelled: the disk offload has been closed")


@dataclass(slots=True, eq=False)
class Piece:
    """Holds memory to be read or written, which workers take block by block."""

    transfer: Transfer
    slot_offset: int
    view: memoryview
    is_read: bool
    keep: object
    """Owns the memory, and is kept as long as the piece."""
    after: Callable[[], None] | None
    """Is called when all of it is settled."""
    num_taken_bytes: int = 0
    num_settled_bytes: int = 0


class WorkState:
    """Holds what the workers share with the pool: they hold this and not the pool, so that a forgotten pool can die."""

    def __init__(self, scratch: ScratchFile, block_bytes: int, stall_seconds: float) -> None:
        self.scratch = scratch
        self.block_bytes = block_bytes
        self.stall_seconds = stall_seconds
        self.lock = threading.RLock()  # reentrant: a garbage collection inside a locked region may run our callbacks
        self.work_added = threading.Condition(self.lock)
        self.work_done = threading.Condition(self.lock)
        self.questions: list[Callable[[], bool]] = []
        self.pieces: deque[Piece] = deque()
        self.has_looker = False
        self.failure: BaseException | None = None
        self.is_closing = False
        self.num_finished = 0
        self.bytes_written = 0
        self.bytes_read = 0
        self.process_id = os.getpid()

    def add_share(self, transfer: Transfer) -> None:
        """Counts one more piece into `transfer`, before it is queued."""
        with self.lock:
            transfer._pending += 1

    def queue(self, piece: Piece, *, is_urgent: bool) -> None:
        """Hands a counted piece to the workers, or drops it when the pool is closing.

        Where a worker looks for work by itself, only an urgent piece wakes one.
        """
        with self.lock:
            is_dropped = self.is_closing
            if not is_dropped:
                if is_urgent:
                    self.pieces.appendleft(piece)
                else:
                    self.pieces.append(piece)
                if is_urgent or not self.has_looker:
                    self.work_added.notify()
        if is_dropped:
            self.drop(piece)

    def take(self) -> tuple[Piece, memoryview, int] | None:
        """Waits for the next block, and returns its piece, its memory and its place in the slot.

        One worker is woken for a piece; it wakes the next one if there is more. None comes when the pool is closing.
        """
        num_looks = 0
        with self.lock:
            while not self.pieces:
                if self.is_closing:
                    return None
                if self.has_looker or num_looks == _MAX_LOOKS:
                    self.work_added.wait()
                    continue
                self.has_looker = True
                try:
                    self.work_added.wait(_LOOK_SECONDS)
                finally:
                    self.has_looker = False
                num_looks += 1
            piece = self.pieces[0]
            start, piece.num_taken_bytes = piece.num_taken_bytes, piece.num_taken_bytes + self.block_bytes
            if piece.num_taken_bytes >= len(piece.view):
                self.pieces.popleft()
            if self.pieces:
                self.work_added.notify()
        return piece, piece.view[start : start + self.block_bytes], piece.slot_offset + start

    def drop(self, piece: Piece) -> None:
        """Finishes what nobody has taken of a piece without doing it."""
        piece.transfer.is_cancelled = True
        self.settle(piece, max(0, len(piece.view) - piece.num_taken_bytes))

    def settle(self, piece: Piece, num_bytes: int) -> None:
        """Counts so much of a piece as finished; with the last of it, gives back what it holds."""
        with self.lock:
            self.num_finished += 1
            piece.num_settled_bytes += num_bytes
            if piece.num_settled_bytes < len(piece.view):
                return
        try:
            if piece.after is not None:
                piece.after()
        finally:
            self.finish_share(piece.transfer)

    def finish_share(self, transfer: Transfer) -> None:
        """Counts one share of `transfer` as finished; the last one calls its callbacks."""
        callbacks: list[Callable[[], None]] = []
        with self.lock:
            transfer._pending -= 1
            if transfer._pending == 0:
                callbacks, transfer._callbacks = transfer._callbacks, []
        try:
            for callback in callbacks:
                callback()
        finally:
            with self.lock:
                if any(is_ready() for is_ready in self.questions):
                    self.work_done.notify_all()

    def wait_for(self, is_ready: Callable[[], bool]) -> None:
        """Blocks until `is_ready()`, asked again whenever a piece is finished."""
        left_seconds = self.stall_seconds
        with self.lock:
            self.questions.append(is_ready)
            if self.pieces:
                self.work_added.notify()
            try:
                while not is_ready():
                    self.raise_failure()
                    num_finished = self.num_finished
                    seconds = min(LOOK_SECONDS, left_seconds)
                    if self.work_done.wait(seconds) or self.num_finished != num_finished:
                        left_seconds = self.stall_seconds
                        continue
                    left_seconds -= seconds
                    if left_seconds <= 0:
                        self.failure = stalled_disk(
                            self.scratch.path,
                            f"has finished nothing for {self.stall_seconds:.0f} s with {len(self.pieces) + 1} "
                            "transfers waiting",
                            f"give another {self.scratch.option} DIR",
                        )
            finally:
                self.questions.remove(is_ready)
            self.raise_failure()

    def fail(self, error: BaseException) -> None:
        """Notes a failure, if it is the first, for whoever waits and whoever comes later."""
        with self.lock:
            self.failure = self.failure or error
            self.work_done.notify_all()

    def raise_failure(self) -> None:
        """Raises a fresh copy of the first failure: raising one object again and again would grow its traceback."""
        failure = self.failure
        if isinstance(failure, StoreError):
            raise failure.without_frames() from failure
        if failure is not None:
            raise StoreError(
                f"a worker moving bytes to or from {self.scratch.path} died of {type(failure).__name__}: {failure}"
            ) from failure

    def run_block(self, piece: Piece, view: memoryview, slot_offset: int) -> None:
        """Moves one block, unless nobody wants it any more."""
        transfer, size = piece.transfer, len(view)
        if transfer.is_cancelled or self.failure is not None:
            return
        if not piece.is_read:
            transfer.slot.checksums[slot_offset] = crc32(view)
            self.scratch.write(transfer.slot, slot_offset, view, transfer.label)
            with self.lock:
                self.bytes_written += size
            return
        self.scratch.read(transfer.slot, slot_offset, view, transfer.label)
        with self.lock:
            self.bytes_read += size
        if transfer.slot.checksums.get(slot_offset) != crc32(view):
            if transfer.slot.may_change:  # perhaps nobody wants these bytes, or who does is told
                transfer.slot.is_torn = True
                return
            offset = transfer.slot.offset + slot_offset
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


def stalled_disk(path: str, what: str, way_out: str) -> OffloadIOError:
    """Returns the error of a disk that does nothing any more."""
    return OffloadIOError(
        f"the disk behind {path} {what}; look at the kernel log (dmesg) and {way_out}",
        path=path,
        offset=0,
        wanted_bytes=0,
        got_bytes=0,
        errno=0,
    )


def run_worker(state: WorkState) -> None:
    """Moves blocks until the pool closes: the life of a worker thread."""
    schedule_as_batch()
    while (taken := state.take()) is not None:
        piece, view, slot_offset = taken
        try:
            try:
                state.run_block(piece, view, slot_offset)
            except BaseException as error:  # handed to the training thread, whatever it is
                state.fail(error)
            state.settle(piece, len(view))
        except BaseException as error:
            state.fail(error)
        del taken, piece, view  # an idle worker must not keep a buffer alive


def shut_down(state: WorkState, threads: list[threading.Thread]) -> None:
    """Ends the workers and closes the file; does nothing in a forked child, where neither is its own."""
    if state.process_id != os.getpid():
        return
    with state.lock:
        state.is_closing = True
        dropped = list(state.pieces)
        state.pieces.clear()
        state.work_added.notify_all()
    for piece in dropped:
        state.drop(piece)
    deadline = time.monotonic() + _JOIN_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() and thread is not threading.current_thread() for thread in threads):
        # Closing the file under a thread that is still in a write could send that write into another file.
        _logger.warning(
            "a disk transfer in %s does not end; its scratch file stays open until the process ends; check the disk",
            state.scratch.path,
        )
    else:
        state.scratch.close()
