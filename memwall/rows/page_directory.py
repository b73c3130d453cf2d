"""Which page is in which frame of memory, which has changed, and where it is in the file; what a swap changes in that.

Like `rows_loops`: in C where the installation has a library for it, by tensors where not, with the same result.
"""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from memwall.rows.page_swaps import PageSwaps, pages_library

__all__ = ["AWAY", "LEAVING", "PageDirectory", "SlotNeeded"]

AWAY, LEAVING = -1, -2
"""In place of the frame of a page that has none, and of one that is still being written out of its."""
_NUM_ENTRIES = 1024
_OUTSIDE = -(1 << 63)


class SlotNeeded(NamedTuple):
    """In place of a plan, of which nothing is done: pages of this slot would be written, and it has no place yet."""

    slot: int


class _CDirectory(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("frame_of", "checksums", "offsets", "page_in", "changed", "moving")),
        *((name, ctypes.c_uint64) for name in ("num_frames", "num_covered", "num_offsets", "num_pages")),
        *((name, ctypes.c_uint64) for name in ("pages_per_slot", "page_bytes", "num_written", "num_read")),
    )


class PageDirectory:
    """The state of pages, numbered from 0 on, and of frames.

    Args:
        num_frames: frames in memory.
        page_bytes: of a page.
        pages_per_slot: pages that share a slot in the file.
    """

    def __init__(self, num_frames: int, page_bytes: int, pages_per_slot: int) -> None:
        self.num_frames, self.page_bytes, self.pages_per_slot = num_frames, page_bytes, pages_per_slot
        self.num_pages = 0
        """Pages that exist; further ones have a frame before they do."""
        self.num_written = self.num_read = 0
        """Pages that left for the file so far, and pages that came from there, as planned."""
        self.frame_of = torch.full((_NUM_ENTRIES,), AWAY, dtype=torch.int32, device="cpu")
        self.is_changed = torch.zeros(num_frames, dtype=torch.bool, device="cpu")
        """Of frames, whether the file has other bytes."""
        self.is_moving = torch.zeros(num_frames, dtype=torch.bool, device="cpu")
        self._page_in = torch.full((num_frames,), -1, dtype=torch.int64, device="cpu")
        self._checksums = torch.zeros(_NUM_ENTRIES, dtype=torch.int64, device="cpu")
        self._slot_offsets = torch.full((_NUM_ENTRIES,), -1, dtype=torch.int64, device="cpu")

    @property
    def bytes_per_frame(self) -> int:
        """What is known of a frame."""
        return self._page_in.itemsize + self.is_changed.itemsize + self.is_moving.itemsize

    @property
    def page_entries_bytes(self) -> int:
        """What is known of pages."""
        return self.frame_of.nbytes + self._checksums.nbytes

    def cover(self, num_pages: int) -> None:
        """Have entries for so many pages."""
        self.frame_of = _covering(self.frame_of, num_pages, AWAY)
        self._checksums = _covering(self._checksums, num_pages, 0)
        self._slot_offsets = _covering(self._slot_offsets, -(-num_pages // self.pages_per_slot), -1)

    def set_slot(self, slot: int, offset: int) -> None:
        """Say where a slot's first page is in the file."""
        self._slot_offsets[slot] = offset

    def plan(self, frames: Tensor, pages: Tensor) -> PageSwaps | SlotNeeded:
        """Books that pages take the place of those in frames, and says what must move for that, if anything.

        Args:
            frames: [n], each once, none of which is moving.
            pages: [n], -1 for none, covered, and without a frame.
        """
        library = pages_library()
        if library is None:
            return self._plan_by_tensors(frames, pages)
        frames, pages = frames.contiguous(), pages.contiguous()
        assert frames.numel() == pages.numel()
        table = torch.empty(len(PageSwaps._fields), frames.numel(), dtype=torch.int64, device="cpu")
        pointers = frames.data_ptr(), pages.data_ptr(), frames.numel(), table.data_ptr()
        directory = self._in_c()
        num_moves: int = library.plan_swaps(ctypes.byref(directory), *pointers)
        self.num_written, self.num_read = directory.num_written, directory.num_read
        if num_moves == _OUTSIDE:
            raise IndexError(f"of {frames.numel()} frames or pages of a table of rows, one does not exist")
        return SlotNeeded(-1 - num_moves) if num_moves < 0 else PageSwaps(*table[:, :num_moves].unbind())

    def book(self, swaps: PageSwaps) -> None:
        """Says that swaps that were planned are done."""
        library = pages_library()
        if library is not None:
            assert all(tensor.is_contiguous() for tensor in swaps)
            pointers = (tensor.data_ptr() for tensor in (swaps.frames, swaps.leaving, swaps.checksums))
            if not library.book_swaps(ctypes.byref(self._in_c()), *pointers, swaps.frames.numel()):
                raise IndexError(f"of {swaps.frames.numel()} swaps of pages, a frame or a page does not exist")
            return
        is_writing = swaps.leaving >= 0
        left = swaps.leaving[is_writing]
        self.is_moving[swaps.frames] = False
        self._checksums[left] = swaps.checksums[is_writing]
        self.frame_of[left] = AWAY

    def _in_c(self) -> _CDirectory:
        return _CDirectory(
            *(self.frame_of.data_ptr(), self._checksums.data_ptr(), self._slot_offsets.data_ptr()),
            *(self._page_in.data_ptr(), self.is_changed.data_ptr(), self.is_moving.data_ptr()),
            *(self.num_frames, self.frame_of.numel(), self._slot_offsets.numel(), self.num_pages),
            *(self.pages_per_slot, self.page_bytes, self.num_written, self.num_read),
        )

    def _plan_by_tensors(self, frames: Tensor, pages: Tensor) -> PageSwaps | SlotNeeded:
        leaving = self._page_in[frames]
        must_write = (leaving >= 0) & self.is_changed[frames]
        must_read = (pages >= 0) & (pages < self.num_pages)
        slots = leaving[must_write] // self.pages_per_slot
        without_place = slots[self._slot_offsets[slots] < 0]
        if without_place.numel():
            return SlotNeeded(int(without_place[0]))
        self.num_written += int(must_write.sum())
        self.num_read += int(must_read.sum())
        self.frame_of[leaving[leaving >= 0]] = AWAY
        self.frame_of[leaving[must_write]] = LEAVING
        self.frame_of[pages[pages >= 0]] = frames[pages >= 0].int()
        self._page_in[frames] = pages
        self.is_changed[frames] = ~must_read
        moves = must_write | must_read
        frames, pages = frames[moves], torch.where(must_read, pages, -1)[moves]
        leaving = torch.where(must_write, leaving, -1)[moves]
        self.is_moving[frames] = True
        expected = torch.where(pages < 0, 0, self._checksums[pages])
        return PageSwaps(
            *(frames, leaving, self._offsets(leaving), pages, self._offsets(pages), torch.zeros_like(frames), expected)
        )

    def _offsets(self, pages: Tensor) -> Tensor:
        """Where pages are in the file, -1 for none."""
        offsets = self._slot_offsets[pages // self.pages_per_slot] + pages % self.pages_per_slot * self.page_bytes
        return torch.where(pages < 0, -1, offsets)


def _covering(entries: Tensor, count: int, empty: int) -> Tensor:
    """Entries of pages or slots, or more of them, so that there are `count`."""
    if count <= entries.numel():
        return entries
    grown = torch.full((max(count, entries.numel() * 3 // 2),), empty, dtype=entries.dtype, device="cpu")
    grown[: entries.numel()] = entries
    return grown
