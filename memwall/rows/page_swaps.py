"""Pages on their way between frames of memory and a scratch file: each checked, many in a call if possible.

A page is small, so what the interpreter does for each of them would take the training thread's time; so would threads
that ask for the interpreter. Threads in C do as many swaps as go right; the rest, and all of them where the file is not
the system's own, go through the store's one door, which tries again or says what is wrong.
"""

import ctypes
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from memwall.errors import OffloadIOError, StoreError
from memwall.native import load_library
from memwall.store.checksum import crc32
from memwall.store.scheduling import schedule_as_batch
from memwall.store.scratch import ScratchFile, Slot
from memwall.units import format_bytes

_SWAPS_PER_TASK = 16
"""Waking a thread takes the training thread's time, as much as some pages do."""
_STALL_SECONDS = 60.0
# Small random reads need several threads to keep a disk busy.
_NUM_THREADS = 4
_HAS_LEFT, _HAS_COME = 1, 2  # as in pages.c

Place = Callable[[int], tuple[Slot, int]]
"""Returns the slot that a page has a place in, and where there."""


class PageSwaps(NamedTuple):
    """Names pages that leave frames, and pages that come into them then; all tensors are int64 [n], -1 for none."""

    frames: Tensor
    leaving: Tensor
    leaving_offsets: Tensor
    """They are bytes in the file."""
    coming: Tensor
    coming_offsets: Tensor
    checksums: Tensor
    """They are filled in for pages that leave."""
    expected: Tensor
    """Pages that come must have these checksums."""


class PageMover:
    """Moves pages between memory and a scratch file.

    Args:
        scratch: the file.
        memory: the frames, one after another.
        page_bytes: of a frame.
        place: where a page is in the file.
    """

    def __init__(self, scratch: ScratchFile, memory: memoryview, page_bytes: int, place: Place) -> None:
        self._scratch, self._memory, self._page_bytes, self._place = scratch, memory, page_bytes, place
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._pool: int | None = None
        self._in_c: list[_MovesInC] = []
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, swaps: PageSwaps) -> "Moves":
        """Begins them; frames and tensors are the threads' until they are done."""
        count = swaps.frames.numel()
        size = max(_SWAPS_PER_TASK, -(-count // _NUM_THREADS))
        parts = [range(first, min(count, first + size)) for first in range(0, count, size)]
        library, fd = _library(), self._scratch.system_fd
        if library is not None and fd is not None:
            self._pool = self._pool or library.open_pool(_NUM_THREADS)
        if library is not None and fd is not None and self._pool:
            if not all(tensor.is_contiguous() and tensor.numel() == count for tensor in swaps):
                raise IndexError(f"the parts of {count} swaps of pages are not of one length, or have gaps")
            tasks = (_Task * len(parts))()
            done = torch.zeros(count, dtype=torch.uint8, device="cpu")
            moves = _MovesInC(library, self._pool, tasks, lambda: self._complete(swaps, done))
            self._in_c = [other for other in self._in_c if not other.is_done]
            self._in_c.append(moves)  # threads use their memory, whatever becomes of the caller
            pointers = (
                swaps.frames,
                swaps.leaving_offsets,
                swaps.coming_offsets,
                swaps.checksums,
                swaps.expected,
                done,
            )
            whole = _Task(fd, self._address, self._page_bytes, count, *(tensor.data_ptr() for tensor in pointers))
            num_frames = self._memory.nbytes // self._page_bytes
            if library.begin_tasks(self._pool, ctypes.byref(whole), num_frames, tasks, size) < 0:
                self._in_c.remove(moves)
                raise IndexError(f"of the frames of {count} swaps of pages, one is not among {num_frames}")
            return moves
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                _NUM_THREADS, thread_name_prefix="memwall-rows", initializer=schedule_as_batch
            )
        return _MovesByThreads([self._executor.submit(self._move, swaps, part) for part in parts])

    def close(self) -> None:
        """Ends the threads, after what they are at; what waits is not done."""
        library, pool, self._pool = _library(), self._pool, None
        if library is not None and pool:
            library.close_pool(pool)
            self._in_c = []
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _complete(self, swaps: PageSwaps, done: Tensor) -> None:
        """Does what is left of swaps, of each of which it is said what is done."""
        for number in (done != _HAS_LEFT | _HAS_COME).nonzero()[:, 0].tolist():
            self._move_one(swaps, number, has_left=bool(int(done[number]) & _HAS_LEFT))

    def _move(self, swaps: PageSwaps, part: range) -> None:
        for number in part:
            self._move_one(swaps, number, has_left=False)

    def _move_one(self, swaps: PageSwaps, number: int, *, has_left: bool) -> None:
        frame, leaving, coming = (int(t[number]) for t in (swaps.frames, swaps.leaving, swaps.coming))
        with self._memory[frame * self._page_bytes : (frame + 1) * self._page_bytes] as view:
            if leaving >= 0 and not has_left:
                swaps.checksums[number] = crc32(view)
                self._scratch.write(*self._place(leaving), view, f"page {leaving} of a table of rows")
            if coming >= 0:
                slot, offset = self._place(coming)
                self._scratch.read(slot, offset, view, f"page {coming} of a table of rows")
                if crc32(view) != int(swaps.expected[number]):
                    raise self._different(coming, slot.offset + offset)

    def _different(self, page: int, offset: int) -> OffloadIOError:
        return OffloadIOError(
            f"page {page} of a table of rows came back different from the scratch file in {self._scratch.path}: the "
            f"checksum of {format_bytes(self._page_bytes)} at byte {offset} does not match what was written; the disk "
            "or its cable, or the machine's memory, loses data: check them, and give another directory",
            path=self._scratch.path,
            offset=offset,
            wanted_bytes=self._page_bytes,
            got_bytes=self._page_bytes,
            errno=0,
        )


class _Task(ctypes.Structure):
    """Is laid out as in pages.c."""

    _fields_ = (
        ("fd", ctypes.c_int64),
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("page_bytes", "count")),
        *((name, ctypes.c_void_p) for name in ("frames", "leaving", "coming", "checksums", "expected", "done")),
        *((name, ctypes.c_uint64) for name in ("num_left", "is_done")),
        ("next", ctypes.c_void_p),
    )


class _MovesInC:
    def __init__(
        self, library: ctypes.CDLL, pool: int, tasks: "ctypes.Array[_Task]", complete: Callable[[], None]
    ) -> None:
        self._library, self._pool, self._tasks, self._complete = library, pool, tasks, complete

    @property
    def is_done(self) -> bool:
        """Tells whether `finish` would not wait."""
        return all(task.is_done for task in self._tasks)

    def finish(self) -> None:
        """Returns once they are done."""
        num_done, since = -1, time.monotonic()
        while num_done < len(self._tasks):
            before, num_done = num_done, self._library.await_tasks(self._pool, self._tasks, len(self._tasks))
            if num_done > before:
                since = time.monotonic()
            elif time.monotonic() - since > _STALL_SECONDS:
                raise StoreError(
                    f"the disk with the rows of a table has finished nothing for {_STALL_SECONDS:.0f} s; look at the "
                    "kernel log (dmesg) and give another directory"
                )
        if any(task.num_left for task in self._tasks):
            self._complete()


class _MovesByThreads:
    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    @property
    def is_done(self) -> bool:
        return all(future.done() for future in self._futures)

    def finish(self) -> None:
        failures = [failure for failure in (future.exception() for future in self._futures) if failure is not None]
        if failures:
            raise failures[0]


Moves = _MovesInC | _MovesByThreads
"""Stands for swaps under way."""


def _library() -> ctypes.CDLL | None:
    """Returns the library where it is fast."""
    library = pages_library()
    return library if library is not None and library.crc32_is_fast() else None


@functools.cache
def pages_library() -> ctypes.CDLL | None:
    """Returns what there is in C for pages, if this installation has it."""
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    signatures = {
        "crc32_is_fast": (ctypes.c_int, ()),
        "open_pool": (pointer, (number,)),
        "close_pool": (None, (pointer,)),
        "begin_tasks": (ctypes.c_int64, (pointer, pointer, number, pointer, number)),
        "await_tasks": (number, (pointer, pointer, number)),
    }
    return load_library("pages", signatures, folder=Path(__file__).parent / "native")
