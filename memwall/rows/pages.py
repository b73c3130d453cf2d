"""Rows of one size in pages, hot pages in memory and cold ones on disk: the cache under a table of rows.

A page holds rows that arrived one after another, so rows that are common, and come early, share pages. Memory is one
arena of page frames; a frame is chosen for reuse by the clock algorithm (second chance), and its page is written first
if it has changed. Threads swap pages; the caller waits for those it needs.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from memwall.errors import StoreError, UsageError
from memwall.rows.loops import HELD, RECENT, Arena, locate_rows, take_cold_frames
from memwall.rows.page_directory import AWAY, LEAVING, PageDirectory, SlotNeeded
from memwall.rows.page_swaps import Moves, PageMover, PageSwaps
from memwall.store.backend import round_up
from memwall.store.buckets import BucketBuffer
from memwall.store.scratch import ScratchFile, Slot
from memwall.units import format_bytes

_SEGMENT_BYTES = 16 << 20
_MIN_FRAMES = 16
# Emptying frames for one write costs the caller nearly as much as for several.
_WRITES_AHEAD = 4


class _Batch(NamedTuple):
    """Holds swaps under way."""

    moves: Moves
    swaps: PageSwaps


class PageCache:
    """Holds rows by position, read and written in batches. Positions are used from 0 on, without gaps.

    Args:
        scratch: where pages go that memory has no room for; the caller closes it, after `close`.
        row_elements: elements in a row.
        dtype: of the elements.
        cache_bytes: the most memory for pages.
        page_bytes: about how much is read and written at a time.

    Raises:
        UsageError: the cache would hold fewer than 16 pages.
    """

    def __init__(
        self,
        scratch: ScratchFile,
        *,
        row_elements: int,
        dtype: torch.dtype,
        cache_bytes: int,
        page_bytes: int,
    ) -> None:
        row_bytes = row_elements * dtype.itemsize
        self.page_bytes = round_up(max(page_bytes, row_bytes))
        self.rows_per_page = self.page_bytes // row_bytes
        self.num_frames = cache_bytes // self.page_bytes
        if self.num_frames < _MIN_FRAMES:
            raise UsageError(
                f"a cache of {format_bytes(cache_bytes)} holds {self.num_frames} pages of "
                f"{format_bytes(self.page_bytes)}, and {_MIN_FRAMES} are needed; give it at least "
                f"{format_bytes(_MIN_FRAMES * self.page_bytes, rounding='up')}"
            )
        self._scratch = scratch
        buffer = BucketBuffer(self.num_frames * self.page_bytes)
        self._memory = buffer.view(buffer.num_bytes)
        self._buffer = buffer
        whole = buffer.tensor(0, torch.empty(buffer.num_bytes // dtype.itemsize, dtype=dtype, device="meta"))
        self._arena = Arena(
            whole.as_strided(
                (self.num_frames, self.rows_per_page, row_elements),
                (self.page_bytes // dtype.itemsize, row_elements, 1),
            )
        )
        self._mover = PageMover(scratch, self._memory, self.page_bytes, self._place)
        self._directory = PageDirectory(self.num_frames, self.page_bytes, max(1, _SEGMENT_BYTES // self.page_bytes))
        self._use = torch.zeros(self.num_frames, dtype=torch.uint8, device="cpu")
        self._num_used_frames = 0
        self._hand = 0
        self._spare = torch.empty(0, dtype=torch.int64, device="cpu")
        self._num_new = self._usual_new = 0
        self._slots: dict[int, Slot] = {}
        self._under_way: list[_Batch] = []
        self._failure: str | None = None
        self._process_id = os.getpid()

    @property
    def num_bytes(self) -> int:
        """Returns the memory held by pages and by the directory; frames that were never used cost none."""
        per_frame = self.page_bytes + self._directory.bytes_per_frame + self._use.itemsize
        return self._num_used_frames * per_frame + self._directory.page_entries_bytes

    @property
    def num_pages_read(self) -> int:
        """Returns how many pages were fetched from disk so far."""
        return self._directory.num_read

    @property
    def num_pages_written(self) -> int:
        """Returns how many pages were given to the disk so far."""
        return self._directory.num_written

    def read(self, positions: Tensor, num_columns: int) -> Tensor:
        """Returns the first `num_columns` elements of these rows, [n, num_columns].

        Raises:
            StoreError: a page cannot be had, or came back different.
        """
        parts = []
        with self.refusing_after_failure():
            for part in positions.split(self.num_frames // 2):
                parts.append(self._arena.read(self._locate(part), part, num_columns))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def write(self, positions: Tensor, rows: Tensor) -> None:
        """Replaces these rows, each given once; the next unused positions, in their order, make new ones.

        Raises:
            StoreError: there is no room on disk, or a transfer failed. The cache refuses further work then.
        """
        size = self.num_frames // 2
        with self.refusing_after_failure():
            for part, values in zip(positions.split(size), rows.split(size), strict=True):
                frames = self._locate(part)
                self._arena.write(frames, part, values)
                self._directory.is_changed[frames] = True
                self._empty_ahead()

    def prefetch(self, positions: Tensor) -> None:
        """Begins to fetch the pages of these rows, as far as a quarter of the cache holds them."""
        with self.refusing_after_failure():
            # Those that are here stay, as what has just been used does; for those still leaving it is too early.
            is_away = self._look_up(positions)[0] == AWAY
            pages = torch.unique(positions[is_away] // self.rows_per_page)
            pages = pages[pages < self._directory.num_pages][: self.num_frames // 4]
            if pages.numel():
                self._admit(pages, has_spares=False)  # nobody waits for these; writes of new rows would

    @contextmanager
    def refusing_after_failure(self) -> Iterator[None]:
        """Lets no work follow on work that broke off: a row could be half there, and would be read as whole."""
        self.check_usable()
        try:
            yield
        except BaseException as error:
            self._failure = self._failure or str(error) or type(error).__name__
            raise

    def close(self) -> None:
        """Ends the threads. Never raises, except what a thread could not."""
        if self._process_id == os.getpid():
            self._mover.close()
        self._failure = self._failure or "it has been closed"

    def check_usable(self) -> None:
        """Returns if rows can be had here.

        Raises:
            StoreError: this is a forked process, or a transfer failed before, or the cache is closed.
        """
        if self._process_id != os.getpid():
            raise StoreError(
                f"a table of rows of process {self._process_id} was used in process {os.getpid()}, which was forked "
                "from it: both would write the same file; make the table after the fork, or use the spawn start method"
            )
        if self._failure is not None:
            raise StoreError(f"this table of rows can no longer be used: {self._failure}")

    # -- which page is where -----------------------------------------------------------------------------------------

    def _locate(self, positions: Tensor) -> Tensor:
        """Returns the frame of each row, after its page has got there."""
        self._finish_batches(lambda _: False)
        frames, is_missing, is_moving = self._look_up(positions)
        if is_missing:
            has_frame = frames >= 0
            here = frames[has_frame]
            self._use[here] = HELD
            self._admit(torch.unique(positions[~has_frame] // self.rows_per_page))
            self._use[here] = RECENT
            frames, _, is_moving = self._look_up(positions)
        if is_moving:
            self._wait_until_still(frames)
        return frames

    def _look_up(self, positions: Tensor) -> tuple[Tensor, bool, bool]:
        """Returns what `locate_rows` does."""
        if positions.numel():
            self._directory.cover(int(positions.max()) // self.rows_per_page + 1)
        where = self.rows_per_page, self._directory.frame_of, self._use, self._directory.is_moving
        return locate_rows(positions, *where)

    def _admit(self, pages: Tensor, *, has_spares: bool = True) -> None:
        """Gives each of these pages (sorted, each once, all without one) a frame, and begins to fetch those on disk."""
        leaving = pages[self._directory.frame_of[pages] == LEAVING]
        if leaving.numel():
            self._wait_until_written(leaving)  # what is still being written must not be read
        frames = self._take_frames(pages.numel(), has_spares=has_spares)
        self._swap(frames, pages)
        self._use[frames] = RECENT
        end = int(pages[-1]) + 1
        self._num_new += max(0, end - self._directory.num_pages)
        self._directory.num_pages = max(end, self._directory.num_pages)

    def _empty_ahead(self) -> None:
        """Begins to empty frames for a few writes' new rows, once there are too few of them for the next to be sure."""
        self._usual_new = max(self._num_new, self._usual_new * 7 // 8)  # the most of late: some writes take more
        self._num_new = 0
        wanted = min((self._usual_new + 1) * _WRITES_AHEAD, self.num_frames // 8)
        if self._num_used_frames == self.num_frames and self._spare.numel() < wanted // 2:
            taken = self._take_frames(wanted - self._spare.numel(), has_spares=False)
            self._swap(taken, torch.full_like(taken, -1))
            self._spare = torch.cat([self._spare, taken])

    def _take_frames(self, count: int, *, has_spares: bool = True) -> Tensor:
        """Returns frames for `count` pages, now held: unused or emptied ones, then those that the hand finds cold."""
        taken = torch.empty(0, dtype=torch.int64, device="cpu")
        num_unused = min(count, self.num_frames - self._num_used_frames)
        if num_unused:
            taken = torch.arange(self._num_used_frames, self._num_used_frames + num_unused, device="cpu")
            self._num_used_frames += num_unused
            self._use[taken] = HELD
        if has_spares and count > num_unused:
            spare, self._spare = self._spare[: count - num_unused], self._spare[count - num_unused :]
            if bool(self._directory.is_moving[spare].any()):
                self._wait_until_still(spare)
            taken = torch.cat([taken, spare])
        while taken.numel() < count:
            cold, self._hand = take_cold_frames(self._use, self._directory.is_moving, self._hand, count - taken.numel())
            taken = torch.cat([taken, cold]) if taken.numel() else cold
            if taken.numel() < count:
                self._finish_batches(lambda _: True)
        return taken

    # -- moving pages ------------------------------------------------------------------------------------------------

    def _swap(self, frames: Tensor, pages: Tensor) -> None:
        """Begins to put pages, -1 for none, into frames whose own pages leave."""
        self._finish_batches(lambda _: False)
        while isinstance(swaps := self._directory.plan(frames, pages), SlotNeeded):
            slot = self._scratch.allocate(self._directory.pages_per_slot * self.page_bytes)
            self._slots[swaps.slot] = slot
            self._directory.set_slot(swaps.slot, slot.offset)
        if not swaps.frames.numel():
            return
        self._under_way.append(_Batch(self._mover.begin(swaps), swaps))

    def _place(self, page: int) -> tuple[Slot, int]:
        pages_per_slot = self._directory.pages_per_slot
        return self._slots[page // pages_per_slot], page % pages_per_slot * self.page_bytes

    def _wait_until_still(self, frames: Tensor) -> None:
        """Returns when none of these frames is moving."""
        self._finish_batches(lambda swaps: bool(torch.isin(frames, swaps.frames).any()))

    def _wait_until_written(self, pages: Tensor) -> None:
        """Returns when all of these pages are on disk."""
        self._finish_batches(lambda swaps: bool(torch.isin(pages, swaps.leaving).any()))

    def _finish_batches(self, is_wanted: Callable[[PageSwaps], bool]) -> None:
        """Books swaps that are done, after waiting for the wanted ones."""
        for batch in self._under_way:
            if batch.moves.is_done or is_wanted(batch.swaps):
                batch.moves.finish()
                self._directory.book(batch.swaps)
                self._under_way = [other for other in self._under_way if other is not batch]
