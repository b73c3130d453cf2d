"""Rows of one size in pages, hot pages in memory and cold ones on disk: the cache under a table of rows.

A page holds rows that arrived one after another, so rows that are common, and come early, share pages. Memory is one
arena of page frames; a frame is chosen for reuse by the clock algorithm (second chance), and its page is written first
if it has changed. Threads swap pages; the caller waits for those it needs.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from memwall.errors import StoreError, UsageError
from memwall.store.backend import round_up
from memwall.store.buckets import BucketBuffer
from memwall.store.page_swaps import PageMover, PageSwaps
from memwall.store.scratch import ScratchFile, Slot
from memwall.units import format_bytes

__all__ = ["PageCache"]

_SEGMENT_BYTES = 16 << 20
_MIN_FRAMES = 16
_COLD, _RECENT, _HELD = 0, 1, 2

_NONE = torch.empty(0, dtype=torch.int64, device="cpu")


class _Batch(NamedTuple):
    """Swaps under way."""

    futures: list[Future[None]]
    swaps: PageSwaps


class PageCache:
    """Rows by position, read and written in batches. Positions are used from 0 on, without gaps.

    Args:
        scratch: where pages go that memory has no room for; the caller closes it, after `close`.
        row_elements: elements in a row.
        dtype: of the elements.
        cache_bytes: the most memory for pages.
        page_bytes: about how much is read and written at a time.
        num_workers: threads; small random reads need several to keep a disk busy.

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
        num_workers: int = 4,
    ) -> None:
        row_bytes = row_elements * dtype.itemsize
        self.page_bytes = round_up(max(page_bytes, row_bytes))
        self.rows_per_page = self.page_bytes // row_bytes
        self.num_frames = cache_bytes // self.page_bytes
        if self.num_frames < _MIN_FRAMES:
            raise UsageError(
                f"a cache of {format_bytes(cache_bytes)} holds {self.num_frames} pages of "
                f"{format_bytes(self.page_bytes)}, and {_MIN_FRAMES} are needed; give it at least "
                f"{format_bytes(_MIN_FRAMES * self.page_bytes)}"
            )
        self._scratch = scratch
        buffer = BucketBuffer(self.num_frames * self.page_bytes)
        self._memory = buffer.view(buffer.num_bytes)
        self._buffer = buffer
        whole = buffer.tensor(0, torch.empty(buffer.num_bytes // dtype.itemsize, dtype=dtype, device="meta"))
        self._rows = whole.as_strided(
            (self.num_frames, self.rows_per_page, row_elements), (self.page_bytes // dtype.itemsize, row_elements, 1)
        )
        self._mover = PageMover(scratch, self._memory, self.page_bytes, self._place)
        self._frame_of = torch.full((1024,), -1, dtype=torch.int32, device="cpu")
        self._num_pages = 0
        self._page_in = torch.full((self.num_frames,), -1, dtype=torch.int64, device="cpu")
        self._is_changed = torch.zeros(self.num_frames, dtype=torch.bool, device="cpu")
        self._is_moving = torch.zeros(self.num_frames, dtype=torch.bool, device="cpu")
        self._use = torch.zeros(self.num_frames, dtype=torch.uint8, device="cpu")
        self._num_used_frames = 0
        self._hand = 0
        self._spare = torch.empty(0, dtype=torch.int64, device="cpu")
        self._num_new = 0
        self._checksums = torch.zeros(1024, dtype=torch.int64, device="cpu")
        self._slots: dict[int, Slot] = {}
        self._slot_offsets = torch.zeros(1024, dtype=torch.int64, device="cpu")
        self._pages_per_slot = max(1, _SEGMENT_BYTES // self.page_bytes)
        self._under_way: list[_Batch] = []
        self._failure: str | None = None
        self._num_workers = num_workers
        self._workers: ThreadPoolExecutor | None = None
        self._process_id = os.getpid()
        self.num_pages_read = 0
        """Pages fetched from disk so far."""
        self.num_pages_written = 0
        """Pages given to the disk so far."""

    @property
    def num_bytes(self) -> int:
        """Memory held by pages and by the directory; frames that were never used cost none."""
        per_frame = self.page_bytes + self._page_in.itemsize + 3
        per_page = self._frame_of.nbytes + self._checksums.nbytes
        return self._num_used_frames * per_frame + per_page

    def read(self, positions: Tensor, num_columns: int) -> Tensor:
        """The first `num_columns` elements of these rows, [n, num_columns].

        Raises:
            StoreError: a page cannot be had, or came back different.
        """
        parts = []
        with self.refusing_after_failure():
            for part in positions.split(self.num_frames // 2):
                frames, places = self._locate(part)
                parts.append(self._rows[:, :, :num_columns][frames, places])
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else self._rows.new_empty(0, num_columns)

    def write(self, positions: Tensor, rows: Tensor) -> None:
        """Replaces these rows, each given once; the next unused positions, in their order, make new ones.

        Raises:
            StoreError: there is no room on disk, or a transfer failed. The cache refuses further work then.
        """
        size = self.num_frames // 2
        with self.refusing_after_failure():
            for part, values in zip(positions.split(size), rows.split(size), strict=True):
                frames, places = self._locate(part)
                self._rows[frames, places] = values
                self._is_changed[frames] = True
                self._empty_ahead()

    def prefetch(self, positions: Tensor) -> None:
        """Begins to fetch the pages of these rows, as far as a quarter of the cache holds them."""
        with self.refusing_after_failure():
            pages = torch.unique(positions // self.rows_per_page)
            pages = pages[pages < self._num_pages]
            pages = pages[self._frame_of[pages] < 0][: self.num_frames // 4]
            if pages.numel():
                self._admit(pages)

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
        if self._workers is not None and self._process_id == os.getpid():
            self._workers.shutdown(wait=True, cancel_futures=True)
        self._workers = None
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

    def _locate(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The frame of each row, after its page has got there, and its place in the page."""
        pages, inverse = torch.unique(positions // self.rows_per_page, return_inverse=True)
        frames = self._admit(pages)
        if bool(self._is_moving[frames].any()):
            self._wait_for(frames=frames)
        return frames[inverse], positions % self.rows_per_page

    def _admit(self, pages: Tensor) -> Tensor:
        """Gives each of these pages (sorted, each once) a frame, and begins to fetch those that had none."""
        self._cover(int(pages[-1]) + 1 if pages.numel() else 0)
        frames = self._frame_of[pages].long()
        is_missing = frames < 0
        self._use[frames[~is_missing]] = _HELD
        missing = pages[is_missing]
        if missing.numel():
            self._wait_for(pages=missing)  # what is still being written must not be read
            taken = self._take_frames(missing.numel())
            self._swap(taken, missing)
            frames[is_missing] = taken
        self._use[frames] = _RECENT
        if pages.numel() and int(pages[-1]) >= self._num_pages:
            self._num_new += int(pages[-1]) + 1 - self._num_pages
            self._num_pages = int(pages[-1]) + 1
        return frames

    def _cover(self, num_pages: int) -> None:
        self._frame_of = _covering(self._frame_of, num_pages, -1)
        self._checksums = _covering(self._checksums, num_pages, 0)

    def _empty_ahead(self) -> None:
        """Begins to empty as many frames as the last write took for new rows, so that the next one need not wait."""
        wanted = min(self._num_new, self.num_frames // 8)
        self._num_new = 0
        if self._num_used_frames == self.num_frames and self._spare.numel() < wanted:
            taken = self._take_frames(wanted, has_spares=False)
            self._swap(taken, torch.full_like(taken, -1))
            self._spare = torch.cat([self._spare, taken])

    def _take_frames(self, count: int, *, has_spares: bool = True) -> Tensor:
        """Frames for `count` pages, marked as held: unused or emptied ones, then those the clock's hand finds cold."""
        num_unused = min(count, self.num_frames - self._num_used_frames)
        parts = [torch.arange(self._num_used_frames, self._num_used_frames + num_unused, device="cpu")]
        self._num_used_frames += num_unused
        if has_spares:
            parts.append(self._spare[: count - num_unused])
            self._spare = self._spare[count - num_unused :]
        taken = torch.cat(parts)
        if bool(self._is_moving[taken].any()):
            self._wait_for(frames=taken)
        self._use[taken] = _HELD
        needed, num_passed = count - taken.numel(), 0
        while needed:
            if num_passed > 2 * self.num_frames:
                self._wait_for(frames=torch.arange(self.num_frames, device="cpu"))
            window = (
                self._hand + torch.arange(min(self.num_frames, max(1024, 2 * needed)), device="cpu")
            ) % self.num_frames
            cold = ((self._use[window] == _COLD) & ~self._is_moving[window]).nonzero()[:, 0][:needed]
            if cold.numel() == needed:
                window = window[: int(cold[-1]) + 1]
            chosen = window[cold]
            passed = window[self._use[window] == _RECENT]
            self._use[passed] = _COLD
            self._use[chosen] = _HELD
            self._hand = (int(window[-1]) + 1) % self.num_frames
            needed -= chosen.numel()
            num_passed += window.numel()
            parts.append(chosen)
        return torch.cat(parts)

    # -- moving pages ------------------------------------------------------------------------------------------------

    def _swap(self, frames: Tensor, pages: Tensor) -> None:
        """Begins to put pages, -1 for none, into frames whose own pages leave."""
        leaving = self._page_in[frames]
        must_write = (leaving >= 0) & self._is_changed[frames]
        must_read = (pages >= 0) & (pages < self._num_pages)
        for segment in torch.unique(leaving[must_write] // self._pages_per_slot).tolist():
            if segment not in self._slots:
                slot = self._slots[segment] = self._scratch.allocate(self._pages_per_slot * self.page_bytes)
                self._slot_offsets = _covering(self._slot_offsets, segment + 1, 0)
                self._slot_offsets[segment] = slot.offset
        self._frame_of[leaving[leaving >= 0]] = -1
        self._frame_of[pages[pages >= 0]] = frames[pages >= 0].int()
        self._page_in[frames] = pages
        self._is_changed[frames] = ~must_read
        moves = must_write | must_read
        if not bool(moves.any()):
            return
        self._is_moving[frames[moves]] = True
        self.num_pages_written += int(must_write.sum())
        self.num_pages_read += int(must_read.sum())
        frames, pages = frames[moves], torch.where(must_read, pages, -1)[moves]
        leaving = torch.where(must_write, leaving, -1)[moves]
        swaps = PageSwaps(
            frames,
            leaving,
            self._offsets(leaving),
            pages,
            self._offsets(pages),
            torch.zeros_like(frames),
            self._checksums[pages],
        )
        if self._workers is None:
            self._workers = ThreadPoolExecutor(self._num_workers, thread_name_prefix="memwall-rows")
        futures = [self._workers.submit(self._mover.move, part) for part in swaps.chunks(self._num_workers)]
        self._under_way.append(_Batch(futures, swaps))

    def _place(self, page: int) -> tuple[Slot, int]:
        slot = self._slots[page // self._pages_per_slot]
        return slot, page % self._pages_per_slot * self.page_bytes

    def _offsets(self, pages: Tensor) -> Tensor:
        """Where pages are in the file, -1 for none."""
        offsets = self._slot_offsets[pages // self._pages_per_slot] + pages % self._pages_per_slot * self.page_bytes
        return torch.where(pages < 0, -1, offsets)

    def _wait_for(self, *, frames: Tensor = _NONE, pages: Tensor = _NONE) -> None:
        """Returns when none of these frames is moving, and none of these pages is being written.

        Raises:
            StoreError: one of them could not be moved.
        """
        waiting, self._under_way = self._under_way, []
        for batch in waiting:
            swaps = batch.swaps
            is_wanted = bool(torch.isin(frames, swaps.frames).any()) or bool(torch.isin(pages, swaps.leaving).any())
            if not is_wanted and not all(future.done() for future in batch.futures):
                self._under_way.append(batch)
                continue
            failures = [failure for failure in (future.exception() for future in batch.futures) if failure is not None]
            if failures:
                raise failures[0]
            self._is_moving[swaps.frames] = False
            has_left = swaps.leaving >= 0
            self._checksums[swaps.leaving[has_left]] = swaps.checksums[has_left]


def _covering(entries: Tensor, count: int, empty: int) -> Tensor:
    """Entries of pages or slots, or more of them, so that there are `count`."""
    if count <= entries.numel():
        return entries
    grown = torch.full((max(count, entries.numel() * 3 // 2),), empty, dtype=entries.dtype, device="cpu")
    grown[: entries.numel()] = entries
    return grown
