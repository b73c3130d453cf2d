"""Which page is in which frame of memory, which has changed, where it is in the file, and what a swap changes."""

from typing import NamedTuple

import torch
from torch import Tensor

from memwall.rows.page_swaps import PageSwaps

AWAY, LEAVING = -1, -2
"""Stands for the frame of a page that has none, and of one that is still being written out of its."""
_NUM_ENTRIES = 1024


class SlotNeeded(NamedTuple):
    """Comes in place of a plan, of which nothing is done: pages of this slot would be written, and it has no place."""

    slot: int


class PageDirectory:
    """Holds the state of pages, numbered from 0 on, and of frames.

    Args:
        num_frames: frames in memory.
        page_bytes: of a page.
        pages_per_slot: pages that share a slot in the file.
    """

    def __init__(self, num_frames: int, page_bytes: int, pages_per_slot: int) -> None:
        self.page_bytes, self.pages_per_slot = page_bytes, pages_per_slot
        self.num_pages = 0
        """Pages that exist; further ones have a frame before they do."""
        self.num_written = self.num_read = 0
        """Pages that left for the file so far, and pages that came from there, as planned."""
        self.frame_of = torch.full((_NUM_ENTRIES,), AWAY, dtype=torch.int32, device="cpu")
        self.is_changed = torch.zeros(num_frames, dtype=torch.bool, device="cpu")
        """Whether the file has other bytes, by frame."""
        self.is_moving = torch.zeros(num_frames, dtype=torch.bool, device="cpu")
        self._page_in = torch.full((num_frames,), -1, dtype=torch.int64, device="cpu")
        self._checksums = torch.zeros(_NUM_ENTRIES, dtype=torch.int64, device="cpu")
        self._slot_offsets = torch.full((_NUM_ENTRIES,), -1, dtype=torch.int64, device="cpu")

    @property
    def bytes_per_frame(self) -> int:
        """Returns the bytes of what is known of a frame."""
        return self._page_in.itemsize + self.is_changed.itemsize + self.is_moving.itemsize

    @property
    def page_entries_bytes(self) -> int:
        """Returns the bytes of what is known of pages."""
        return self.frame_of.nbytes + self._checksums.nbytes

    def cover(self, num_pages: int) -> None:
        """Makes entries for so many pages."""
        self.frame_of = _covering(self.frame_of, num_pages, AWAY)
        self._checksums = _covering(self._checksums, num_pages, 0)
        self._slot_offsets = _covering(self._slot_offsets, -(-num_pages // self.pages_per_slot), -1)

    def set_slot(self, slot: int, offset: int) -> None:
        """Says where a slot's first page is in the file."""
        self._slot_offsets[slot] = offset

    def plan(self, frames: Tensor, pages: Tensor) -> PageSwaps | SlotNeeded:
        """Books that pages take the place of those in frames, and says what must move for that, if anything.

        Args:
            frames: [n], each once, none of which is moving.
            pages: [n], -1 for none, covered, and without a frame.
        """
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

    def book(self, swaps: PageSwaps) -> None:
        """Notes that swaps that were planned are done."""
        is_writing = swaps.leaving >= 0
        left = swaps.leaving[is_writing]
        self.is_moving[swaps.frames] = False
        self._checksums[left] = swaps.checksums[is_writing]
        self.frame_of[left] = AWAY

    def _offsets(self, pages: Tensor) -> Tensor:
        """Returns where pages are in the file, -1 for none."""
        offsets = self._slot_offsets[pages // self.pages_per_slot] + pages % self.pages_per_slot * self.page_bytes
        return torch.where(pages < 0, -1, offsets)


def _covering(entries: Tensor, count: int, empty: int) -> Tensor:
    """Returns entries of pages or slots, or more of them, so that there are `count`."""
    if count <= entries.numel():
        return entries
    grown = torch.full((max(count, entries.numel() * 3 // 2),), empty, dtype=entries.dtype, device="cpu")
    grown[: entries.numel()] = entries
    return grown
