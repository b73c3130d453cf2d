"""Pages swapped in C and page by page: the same bytes, the same errors."""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memwall.errors import OffloadIOError, StoreError
from memwall.rows import page_swaps
from memwall.rows.page_swaps import PageMover, PageSwaps
from memwall.store.backend import SystemBackend
from memwall.store.buckets import BucketBuffer
from memwall.store.checksum import crc32
from memwall.store.scratch import ScratchFile, Slot

PAGE_BYTES, NUM_PAGES = 4096, 6
NONE = -1


class Pages:
    """Frames of memory with a number each in all their bytes, and a file with room for as many pages."""

    def __init__(self, scratch: ScratchFile) -> None:
        self.scratch = scratch
        self.slot = scratch.allocate(NUM_PAGES * PAGE_BYTES)
        self.buffer = BucketBuffer(NUM_PAGES * PAGE_BYTES)
        self.memory = self.buffer.view(NUM_PAGES * PAGE_BYTES)
        for frame in range(NUM_PAGES):
            self.memory[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES] = bytes([frame + 1]) * PAGE_BYTES
        self.mover = PageMover(scratch, self.memory, PAGE_BYTES, self.place)

    def move(self, swaps: PageSwaps) -> None:
        self.mover.begin(swaps).finish()

    def place(self, page: int) -> tuple[Slot, int]:
        return self.slot, page * PAGE_BYTES

    def frame(self, frame: int) -> int:
        """The byte that a frame is full of."""
        (found,) = set(self.memory[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES])
        return found

    def on_disk(self, page: int) -> int:
        """The byte that a page of the file is full of."""
        buffer = BucketBuffer(PAGE_BYTES)
        view = buffer.view(PAGE_BYTES)
        self.scratch.read(*self.place(page), view, "a page")
        (found,) = set(view)
        return found

    def swaps(self, *moves: tuple[int, int, int], expected: dict[int, int] | None = None) -> PageSwaps:
        """Of each frame the page that leaves and the page that comes."""
        frames, leaving, coming = torch.tensor(moves).t().contiguous().unbind()
        offsets = [torch.where(pages < 0, NONE, self.slot.offset + pages * PAGE_BYTES) for pages in (leaving, coming)]
        known = torch.tensor([(expected or {}).get(page, 0) for page in coming.tolist()])
        return PageSwaps(frames, leaving, offsets[0], coming, offsets[1], torch.zeros_like(frames), known)


@pytest.fixture(params=["in C", "in C without io_uring", "page by page", "past another backend"])
def pages(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pages]:
    class Another(SystemBackend):
        pass

    if request.param == "page by page":
        monkeypatch.setattr(page_swaps, "_library", lambda: None)
    if "in C" in request.param and page_swaps._library() is None:
        pytest.skip("this installation has no library for that, or the processor lacks an instruction")
    backend = Another() if request.param == "past another backend" else None
    with ScratchFile(tmp_path, backend=backend) as scratch:
        assert (scratch.system_fd is None) == (request.param == "past another backend" or not scratch.is_direct)
        pages = Pages(scratch)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if "without" in request.param:
            lowest = os.dup(0)
            os.close(lowest)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # a ring would need a descriptor
        try:
            yield pages
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            pages.mover.close()


def sums(swaps: PageSwaps) -> dict[int, int]:
    return {p: c for p, c in zip(swaps.leaving.tolist(), swaps.checksums.tolist(), strict=True) if p >= 0}


def test_what_goes_right_in_c_passes_no_interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page_swaps._library() is None:
        pytest.skip("this installation has no library for that, or the processor lacks an instruction")
    with ScratchFile(tmp_path) as scratch:
        if scratch.system_fd is None:
            pytest.skip("this file system has no O_DIRECT")
        pages = Pages(scratch)
        monkeypatch.setattr(PageMover, "_move_one", lambda *_, **__: pytest.fail("a page was moved by itself"))
        out = pages.swaps((0, 0, NONE), (1, 1, NONE))
        pages.move(out)
        pages.move(pages.swaps((0, 3, 1), (1, NONE, 0), expected=sums(out)))
        assert [pages.frame(frame) for frame in (0, 1)] == [2, 1]
        pages.mover.close()


def test_pages_leave_and_come_back_into_other_frames(pages: Pages) -> None:
    out = pages.swaps((0, 3, NONE), (1, 4, NONE), (2, 5, NONE))
    pages.move(out)
    assert [pages.on_disk(page) for page in (3, 4, 5)] == [1, 2, 3]
    assert sums(out) == {page: crc32(memoryview(bytes([page - 2]) * PAGE_BYTES)) for page in (3, 4, 5)}
    pages.move(pages.swaps((5, NONE, 3), (4, NONE, 5), expected=sums(out)))
    assert [pages.frame(frame) for frame in range(NUM_PAGES)] == [1, 2, 3, 4, 3, 1]


@pytest.mark.parametrize("pause_seconds", [0.0, 0.01, 0.2])
def test_work_is_done_while_threads_look_for_it_and_once_they_sleep(pages: Pages, pause_seconds: float) -> None:
    for _ in range(3):
        under_way = [pages.mover.begin(pages.swaps((frame, frame, NONE))) for frame in range(NUM_PAGES)]
        for moves in under_way:
            moves.finish()
        assert [pages.on_disk(page) for page in range(NUM_PAGES)] == [1, 2, 3, 4, 5, 6]
        time.sleep(pause_seconds)


def test_a_frame_gives_its_page_up_before_it_takes_another(pages: Pages) -> None:
    first = pages.swaps((0, 0, NONE))
    pages.move(first)
    second = pages.swaps((1, 1, 0), expected=sums(first))
    pages.move(second)
    assert (pages.frame(1), pages.on_disk(1)) == (1, 2)
    pages.move(pages.swaps((0, NONE, 1), expected=sums(second)))
    assert pages.frame(0) == 2


def test_a_page_that_comes_back_different_is_named_and_what_left_before_it_is_whole(pages: Pages) -> None:
    out = pages.swaps((0, 0, NONE), (1, 1, NONE))
    pages.move(out)
    damage = BucketBuffer(PAGE_BYTES)
    damage.memory.fill_(0)
    pages.scratch.write(*pages.place(1), damage.view(PAGE_BYTES), "damage")
    with pytest.raises(OffloadIOError, match="page 1 of a table of rows came back different") as caught:
        pages.move(pages.swaps((2, 2, 0), (3, 3, 1), (4, 4, NONE), expected=sums(out)))
    assert caught.value.offset == pages.slot.offset + PAGE_BYTES
    # The frame holds what came by then: writing it once more would have put that in the place of the page that left.
    assert [pages.on_disk(page) for page in (2, 3)] == [3, 4]
    assert pages.frame(2) == 1


def test_a_page_beyond_the_file_is_an_error(pages: Pages) -> None:
    """GIVEN a read that comes back short THEN the store's own door says what is wrong."""
    beyond = NUM_PAGES + 1
    with pytest.raises(StoreError, match="lie outside a slot"):
        pages.move(
            PageSwaps(*(torch.tensor([v]) for v in (0, NONE, NONE, beyond, 1 << 40, 0, 0))),
        )


def test_many_swaps_at_once_do_not_meet(tmp_path: Path) -> None:
    """GIVEN more swaps than threads, of several batches WHEN all are under way THEN each page comes back as it was."""
    with ScratchFile(tmp_path) as scratch:
        count = 300
        slot, buffer = scratch.allocate(count * PAGE_BYTES), BucketBuffer(count * PAGE_BYTES)
        torch.manual_seed(0)
        memory = torch.frombuffer(buffer.view(count * PAGE_BYTES), dtype=torch.uint8)
        memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8))
        before, mover = (
            memory.clone(),
            PageMover(scratch, buffer.view(count * PAGE_BYTES), PAGE_BYTES, lambda page: (slot, page * PAGE_BYTES)),
        )
        for _ in range(2):
            frames = torch.randperm(count)
            none, offsets = torch.full((count,), NONE), slot.offset + frames * PAGE_BYTES
            out = PageSwaps(frames, frames, offsets, none, none, torch.zeros_like(frames), none)
            parts = [PageSwaps(*tensors) for tensors in zip(*(tensor.split(70) for tensor in out), strict=True)]
            for moves in [mover.begin(part) for part in parts]:
                moves.finish()
            memory.zero_()
            back = PageSwaps(frames, none, none, frames, offsets, torch.zeros_like(frames), out.checksums)
            moves = mover.begin(back)
            moves.finish()
            assert moves.is_done
            assert torch.equal(memory, before)
        mover.close()


def test_a_mover_closes_with_work_at_hand(pages: Pages) -> None:
    """Frames can be given back then: no thread touches them any more."""
    for _ in range(50):
        pages.mover.begin(pages.swaps((0, 3, NONE), (1, 4, NONE), (2, 5, NONE)))
    pages.mover.close()
    pages.mover.close()
    on_disk = pages.on_disk(3)
    pages.memory[: 3 * PAGE_BYTES] = bytes(3 * PAGE_BYTES)
    assert pages.on_disk(3) == on_disk


def test_a_frame_that_is_none_is_refused(pages: Pages) -> None:
    if pages.scratch.system_fd is None or page_swaps._library() is None:
        pytest.skip("threads in C only")
    with pytest.raises(IndexError):
        pages.mover.begin(pages.swaps((NUM_PAGES, 0, NONE)))


def test_who_waits_for_a_disk_that_stands_still_looks_up_and_at_last_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a task that nobody does WHEN it is waited for THEN C returns ten times a second, and time runs out."""
    library = page_swaps.pages_library()
    if library is None:
        pytest.skip("this installation has no library for that")
    pool = library.open_pool(1)
    tasks = (page_swaps._Task * 1)()
    try:
        begin = time.monotonic()
        assert library.await_tasks(pool, tasks, 1) == 0
        assert 0.05 < time.monotonic() - begin < 5.0
        monkeypatch.setattr(page_swaps, "_STALL_SECONDS", 0.05)
        with pytest.raises(StoreError, match="has finished nothing for 0 s"):
            page_swaps._MovesInC(library, pool, tasks, lambda _: None).finish()
        tasks[0].is_done = 1
        assert library.await_tasks(pool, tasks, 1) == 1
    finally:
        library.close_pool(pool)
