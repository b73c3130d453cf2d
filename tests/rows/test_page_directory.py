"""Which page is in which frame: the same as said entry by entry."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memwall.rows.page_directory import AWAY, LEAVING, PageDirectory, SlotNeeded
from memwall.rows.page_swaps import PageSwaps

NUM_FRAMES, PAGES_PER_SLOT, PAGE_BYTES = 6, 3, 4096
pytestmark = pytest.mark.usefixtures("one_thread")


def place(page: int) -> int:
    """Slots lie in the file in an order of their own."""
    return 100_000 * (7 - page // PAGES_PER_SLOT) + page % PAGES_PER_SLOT * PAGE_BYTES


def planned(directory: PageDirectory, frames: list[int], pages: list[int]) -> PageSwaps:
    """A plan, after the slots that it needs have places."""
    tensors = torch.tensor(frames, dtype=torch.int64), torch.tensor(pages, dtype=torch.int64)
    while isinstance(swaps := directory.plan(*tensors), SlotNeeded):
        directory.set_slot(swaps.slot, place(swaps.slot * PAGES_PER_SLOT))
    return swaps


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60)
def test_pages_take_the_place_of_others_and_what_changed_is_written(data: st.DataObject) -> None:
    directory = PageDirectory(NUM_FRAMES, PAGE_BYTES, PAGES_PER_SLOT)
    in_frame: dict[int, int] = {}
    on_disk: dict[int, int] = {}  # checksums
    changed: set[int] = set()
    for step in range(data.draw(st.integers(1, 8))):
        frames = data.draw(st.lists(st.sampled_from(range(NUM_FRAMES)), unique=True))
        away = sorted(set(range(directory.num_pages)) - set(in_frame.values()))
        new = range(directory.num_pages, min(20, directory.num_pages + data.draw(st.integers(0, 4))))
        coming = [*(data.draw(st.lists(st.sampled_from(away), unique=True)) if away else []), *new]
        pages = (sorted(coming) + [-1] * len(frames))[: len(frames)]
        directory.cover(20)
        expected = []
        for frame, page in zip(frames, pages, strict=True):
            old, is_known = in_frame.pop(frame, -1), 0 <= page < directory.num_pages
            is_written = old >= 0 and frame in changed
            changed -= {frame}
            if page >= 0:
                in_frame[frame] = page
                changed |= set() if is_known else {frame}
            if is_written or is_known:
                out = (old, place(old)) if is_written else (-1, -1)
                arriving = (page, place(page)) if is_known else (-1, -1)
                expected.append((frame, *out, *arriving, 0, on_disk[page] if is_known else 0))
            if is_written:
                on_disk[old] = 1000 * step + old
        swaps = planned(directory, frames, pages)
        assert list(zip(*(tensor.tolist() for tensor in swaps), strict=True)) == expected
        moving = {row[0] for row in expected}
        assert directory.is_moving.nonzero()[:, 0].tolist() == sorted(moving)
        leaving = {row[1] for row in expected} - {-1}
        assert [page for page in range(20) if directory.frame_of[page] == LEAVING] == sorted(leaving)
        swaps.checksums[swaps.leaving >= 0] = 1000 * step + swaps.leaving[swaps.leaving >= 0]
        directory.book(swaps)
        assert not directory.is_moving.any()
        where = {page: frame for frame, page in in_frame.items()}
        assert directory.frame_of[:20].tolist() == [where.get(page, AWAY) for page in range(20)]
        directory.num_pages = max([directory.num_pages, *(page + 1 for page in pages)])
        for frame in set(in_frame) & set(data.draw(st.lists(st.sampled_from(range(NUM_FRAMES))))):
            directory.is_changed[frame] = True
            changed.add(frame)


def test_a_plan_that_lacks_a_slot_has_done_nothing() -> None:
    directory = PageDirectory(NUM_FRAMES, PAGE_BYTES, PAGES_PER_SLOT)
    directory.plan(torch.tensor([0, 1]), torch.tensor([0, 4]))
    directory.num_pages = 5
    before = directory.frame_of.clone()
    assert directory.plan(torch.tensor([2, 1]), torch.tensor([5, 6])) == SlotNeeded(1)
    assert torch.equal(directory.frame_of, before)
    assert not directory.is_moving.any()


@pytest.mark.parametrize(("frame", "page"), [(NUM_FRAMES, 0), (0, 5000)])
def test_nothing_outside_the_directory_is_touched(frame: int, page: int) -> None:
    directory = PageDirectory(NUM_FRAMES, PAGE_BYTES, PAGES_PER_SLOT)
    with pytest.raises(IndexError):
        directory.plan(torch.tensor([frame]), torch.tensor([page]))


@pytest.mark.parametrize(("frame", "page"), [(NUM_FRAMES, 0), (0, 5000)])
def test_nothing_outside_the_directory_is_booked(frame: int, page: int) -> None:
    directory = PageDirectory(NUM_FRAMES, PAGE_BYTES, PAGES_PER_SLOT)
    frames, leaving, none = torch.tensor([frame]), torch.tensor([page]), torch.tensor([-1])
    with pytest.raises(IndexError):
        directory.book(PageSwaps(frames, leaving, none, none, none, none, none))
    assert (directory.frame_of == AWAY).all()


def test_more_pages_keep_what_is_known_of_the_first() -> None:
    directory = PageDirectory(NUM_FRAMES, PAGE_BYTES, PAGES_PER_SLOT)
    planned(directory, [3], [0])
    directory.num_pages = 1
    directory.cover(50_000)
    swaps = planned(directory, [3], [49_999])
    assert (swaps.leaving.tolist(), swaps.leaving_offsets.tolist()) == ([0], [place(0)])
    assert directory.frame_of[49_999] == 3
