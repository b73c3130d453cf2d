"""Loops over rows, in C: what a dictionary, a list and an indexed tensor say."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from memwall import RowEmbedding
from memwall.errors import NotAvailableError
from memwall.rows import loops as rows_loops
from memwall.rows.loops import (
    COLD,
    HELD,
    NUM_LEVELS,
    RECENT,
    Arena,
    draw_rows,
    find_rows,
    locate_rows,
    place_rows,
    take_cold_frames,
)

pytestmark = pytest.mark.usefixtures("one_thread")
a_few = settings(max_examples=60)


def test_without_the_library_a_table_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_loops, "load_library", lambda *_, **__: None)
    rows_loops.rows_library.cache_clear()
    with pytest.raises(NotAvailableError, match=r"need memwall's library in C, .* install a wheel for Linux"):
        RowEmbedding(4, 2)
    monkeypatch.undo()
    rows_loops.rows_library.cache_clear()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60, unique=True), st.data())
@a_few
def test_ids_are_found_where_they_were_placed(ids: list[int], data: st.DataObject) -> None:
    cells, known = torch.full((64,), -1, dtype=torch.int32), torch.tensor(ids, dtype=torch.int64)
    middle = data.draw(st.integers(0, len(ids)))
    place_rows(cells, known, 0, middle)
    place_rows(cells, known, middle, len(ids))
    assert sorted(cells[cells >= 0].tolist()) == list(range(len(ids)))
    wanted = data.draw(st.lists(st.sampled_from([*ids, 7, -1]), max_size=80))
    where = {number: position for position, number in enumerate(ids)}
    found = find_rows(cells, known, torch.tensor(wanted, dtype=torch.int64))
    assert found.tolist() == [where.get(number, -1) for number in wanted]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.integers(0, 2**62), st.integers(1, 9))
@a_few
def test_rows_are_drawn_by_sixteen_bits_of_a_hash_of_id_and_column(ids: list[int], seed: int, num_columns: int) -> None:
    def mixed(value: int) -> int:
        bits = value * 0x9E3779B97F4A7C15 % 2**64
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    levels = torch.arange(NUM_LEVELS, dtype=torch.float32)
    num_words = -(-num_columns // 4)
    expected = [
        [mixed(mixed(seed) + row * num_words + c // 4) >> 16 * (c % 4) & 0xFFFF for c in range(num_columns)]
        for row in ids
    ]
    assert draw_rows(torch.tensor(ids, dtype=torch.int64), seed, num_columns, levels).tolist() == expected


def arena() -> tuple[Tensor, Arena]:
    """5 frames of 3 rows of 4 elements, with a gap of one element after each page."""
    memory = torch.arange(5 * 13, dtype=torch.float32)
    rows = memory.as_strided((5, 3, 4), (13, 4, 1))
    return rows, Arena(rows)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 1000)), max_size=40), st.integers(0, 4))
@a_few
def test_rows_are_read_at_the_place_of_their_position(where: list[tuple[int, int]], num_columns: int) -> None:
    rows, of = arena()
    frames, positions = torch.tensor(where, dtype=torch.int64).reshape(-1, 2).t().contiguous()
    found = of.read(frames, positions, num_columns)
    assert torch.equal(found, rows[frames, positions % 3, :num_columns])
    assert found.untyped_storage().data_ptr() != rows.untyped_storage().data_ptr()


@given(st.lists(st.integers(0, 14), max_size=15, unique=True))
@a_few
def test_rows_are_written_and_their_neighbours_stay(places: list[int]) -> None:
    rows, of = arena()
    memory = rows.as_strided((65,), (1,))
    at = torch.tensor(places, dtype=torch.int64)
    new = -torch.rand(len(places), 4) - 1
    expected = memory.clone()
    expected.as_strided((5, 3, 4), (13, 4, 1))[at // 3, at % 3] = new
    of.write(at // 3, at, new)
    assert torch.equal(memory, expected)
    of.write(at[:1] // 3, at[:1], torch.ones(1, 8)[:, ::2])  # as slices of larger tensors are
    assert (rows[at[:1] // 3, at[:1] % 3] == 1).all()


@pytest.mark.parametrize("frame", [5, -6])
def test_no_memory_outside_the_frames_is_touched(frame: int) -> None:
    rows, of = arena()
    before = rows.clone()
    with pytest.raises(IndexError):
        of.read(torch.tensor([0, frame]), torch.tensor([0, 0]), 4)
    with pytest.raises(IndexError):
        of.write(torch.tensor([frame]), torch.tensor([0]), torch.zeros(1, 4))
    assert torch.equal(rows, before)


@given(
    st.lists(st.sampled_from([-2, -1, 0, 1, 2]), min_size=1, max_size=8),
    st.lists(st.integers(0, 30)),
    st.integers(0, 7),
)
@a_few
def test_rows_are_located_by_their_page(frame_of: list[int], numbers: list[int], moving: int) -> None:
    positions = [number % (4 * len(frame_of)) for number in numbers]
    use = torch.tensor([HELD, COLD, COLD], dtype=torch.uint8)
    is_moving = torch.tensor([bool(moving & 1), bool(moving & 2), bool(moving & 4)])
    frames, is_missing, is_any_moving = locate_rows(
        torch.tensor(positions, dtype=torch.int64), 4, torch.tensor(frame_of, dtype=torch.int32), use, is_moving
    )
    expected = [frame_of[position // 4] for position in positions]
    here = {frame for frame in expected if frame >= 0}
    assert frames.tolist() == expected
    assert is_missing == any(frame < 0 for frame in expected)
    assert is_any_moving == any(bool(is_moving[frame]) for frame in here)
    assert use.tolist() == [RECENT if frame in here else first for frame, first in enumerate((HELD, COLD, COLD))]


@given(
    st.lists(st.tuples(st.sampled_from([COLD, RECENT, HELD]), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 29),
    st.integers(0, 30),
)
@a_few
def test_the_clock_takes_what_its_hand_finds_cold(frames: list[tuple[int, bool]], hand: int, count: int) -> None:
    hand %= len(frames)
    use, expected, at = [first for first, _ in frames], list[int](), hand
    for _ in range(2 * len(frames)):
        if len(expected) == count:
            break
        if use[at] == RECENT:
            use[at] = COLD
        elif use[at] == COLD and not frames[at][1]:
            use[at] = HELD
            expected.append(at)
        at = (at + 1) % len(frames)
    states = torch.tensor([first for first, _ in frames], dtype=torch.uint8), torch.tensor([m for _, m in frames])
    taken, new_hand = take_cold_frames(*states, hand, count)
    assert (taken.tolist(), states[0].tolist(), new_hand) == (expected, use, at)
