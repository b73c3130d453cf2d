"""Pages on their way between frames of memory and a scratch file: each checked, many in a call if possible.

A page is small, so what the interpreter does for each of them would take the training thread's time. A function in C
does as many swaps of a thread as go right; the rest, and all of them where the file is not the system's own, go through
the store's one door, which tries again or says what is wrong.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from memwall.errors import OffloadIOError
from memwall.native import load_library
from memwall.store.checksum import crc32
from memwall.store.scratch import ScratchFile, Slot
from memwall.units import format_bytes

__all__ = ["PageMover", "PageSwaps"]

Place = Callable[[int], tuple[Slot, int]]
"""Of a page, the slot that it has a place in, and where there."""


class PageSwaps(NamedTuple):
    """Pages that leave frames, and pages that come into them afterwards; all tensors are int64 [n], -1 for none."""

    frames: Tensor
    leaving: Tensor
    leaving_offsets: Tensor
    """Bytes in the file."""
    coming: Tensor
    coming_offsets: Tensor
    checksums: Tensor
    """Filled in for pages that leave."""
    expected: Tensor
    """Of pages that come."""

    def chunks(self, count: int) -> list["PageSwaps"]:
        """At most so many parts, which share this one's memory."""
        return [PageSwaps(*parts) for parts in zip(*(tensor.chunk(count) for tensor in self), strict=True)]


class PageMover:
    """Moves pages between memory and a scratch file; safe to use from several threads.

    Args:
        scratch: the file.
        memory: the frames, one after another.
        page_bytes: of a frame.
        place: where a page is in the file.
    """

    def __init__(self, scratch: ScratchFile, memory: memoryview, page_bytes: int, place: Place) -> None:
        self._scratch, self._memory, self._page_bytes, self._place = scratch, memory, page_bytes, place

    def move(self, swaps: PageSwaps) -> None:
        """Does them.

        Raises:
            OffloadIOError: a transfer failed, or a page came back different.
        """
        num_done = self._moved_in_c(swaps)
        for number in range(num_done // 2, swaps.frames.numel()):
            self._move_one(swaps, number, has_left=2 * number < num_done)

    def _moved_in_c(self, swaps: PageSwaps) -> int:
        """How many halves of swaps are done."""
        library, fd = _library(), self._scratch.system_fd
        if library is None or fd is None:
            return 0
        memory = ctypes.byref(ctypes.c_char.from_buffer(self._memory))
        pointers = (
            *(swaps.frames, swaps.leaving_offsets, swaps.coming_offsets),
            *(swaps.checksums, swaps.expected),
        )
        done: int = library.swap_pages(
            fd, memory, self._page_bytes, swaps.frames.numel(), *(tensor.data_ptr() for tensor in pointers)
        )
        return done

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


@functools.cache
def _library() -> ctypes.CDLL | None:
    number, pointer = ctypes.c_uint64, ctypes.c_void_p
    signatures = {
        "crc32_is_fast": (ctypes.c_int, ()),
        "swap_pages": (ctypes.c_int64, (ctypes.c_int, pointer, number, number, *(pointer,) * 5)),
    }
    library = load_library("page_swap", signatures)
    return library if library is not None and library.crc32_is_fast() else None
