"""A snapshot's history rebuilt: the curves of the run that wrote it."""

import random

import numpy as np
import pytest
from cuda_history import BASE, MIB, History
from snapshot_runs import TRAIN, Explained, training_step

from memwall.predict.curve import Share
from memwall.predict.snapshot.timeline import Timeline


def assert_true(timeline: Timeline, history: History) -> None:
    found = np.stack([timeline.allocated_bytes, timeline.active_bytes, timeline.reserved_bytes], axis=1)
    assert found.tolist() == [list(row) for row in history.truth]
    free = timeline.split_free_bytes + timeline.expandable_free_bytes + timeline.idle_bytes
    assert (free == timeline.reserved_bytes - timeline.active_bytes).all()
    assert timeline.num_unmatched == 0


def test_curves_are_those_of_the_run(explained: Explained) -> None:
    history = training_step()
    _, timeline = explained(history)
    assert_true(timeline, history)
    assert timeline.active_peak == 7
    assert int(timeline.active_bytes[7]) == 44 * MIB + 512
    assert timeline.split_free_bytes[[1, 2, 3]].tolist() == [0, 12 * MIB, 4 * MIB]
    assert timeline.idle_bytes[[1, 2, 11]].tolist() == [20 * MIB, 0, 30 * MIB]


def test_a_recording_begun_late_still_knows_what_was_there(explained: Explained) -> None:
    history = training_step()
    history.forget()
    history.alloc(0, 8 * MIB, 8 * MIB, [TRAIN])
    history.free(8 * MIB)
    history.free(100 * MIB)
    history.release(200 * MIB)
    analysis, timeline = explained(history)
    assert_true(timeline, history)
    assert analysis.earlier_bytes == 8 * MIB + 512
    assert Share(name="(allocated before the recording)", num_bytes=8 * MIB + 512) in analysis.by_line
    assert analysis.notes == (
        "the recording began in the middle of the run: 2 blocks were there before it and have no stack",
    )


def test_a_remainder_too_small_to_split_belongs_to_the_block(explained: Explained) -> None:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 10 * MIB, 10 * MIB)
    history.alloc(10 * MIB, 9 * MIB + 100, 10 * MIB)
    # In the small pool every remainder is split off.
    history.segment(100 * MIB, 2 * MIB, "small")
    history.alloc(100 * MIB, 1 * MIB, 1 * MIB)
    history.alloc(101 * MIB, 1 * MIB - 600, 1 * MIB - 512)
    history.free(10 * MIB)
    history.alloc(10 * MIB, 9 * MIB - 512, 9 * MIB - 512)
    history.free(0)
    history.free(101 * MIB)
    assert_true(explained(history)[1], history)


def test_a_block_that_waits_for_a_stream_is_active_but_not_allocated(explained: Explained) -> None:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 5 * MIB, 5 * MIB)
    history.alloc(5 * MIB, 5 * MIB, 5 * MIB)
    history.request_free(0)
    history.alloc(10 * MIB, 5 * MIB, 5 * MIB)
    history.complete_free(0)
    history.request_free(5 * MIB)
    _, timeline = explained(history)
    assert_true(timeline, history)
    assert timeline.fragmentation(5).pending_bytes == 5 * MIB
    history.forget()
    history.complete_free(5 * MIB)
    assert_true(explained(history)[1], history)


def test_expandable_segments_grow_and_shrink(explained: Explained) -> None:
    history = History()
    history.segment(0, 20 * MIB, is_expandable=True)
    history.alloc(0, 18 * MIB, 18 * MIB)
    history.segment(20 * MIB, 20 * MIB, is_expandable=True)
    history.alloc(18 * MIB, 21 * MIB, 21 * MIB)
    history.free(18 * MIB)
    history.release(20 * MIB, 20 * MIB)
    _, timeline = explained(history)
    assert_true(timeline, history)
    assert timeline.split_free_bytes.tolist() == [0] * 8
    assert timeline.expandable_free_bytes.tolist() == [0, 0, 2 * MIB, 22 * MIB, MIB, MIB, 22 * MIB, 2 * MIB]


@pytest.mark.parametrize("seed", range(12))
def test_random_runs_are_rebuilt_exactly(seed: int, explained: Explained) -> None:
    history = random_run(random.Random(seed), num_steps=250, forgets=seed % 3 > 0)
    assert len(history.events) > 50
    assert_true(explained(history)[1], history)


def random_run(chance: random.Random, *, num_steps: int, forgets: bool) -> History:
    """Blocks come and go in classic segments of both pools, split as the allocator splits them."""
    history = History()
    num_segments = 0
    for step in range(num_steps):
        if forgets and step == num_steps // 2:
            history.forget()
        done = chance.random()
        if done < 0.08:
            kind = chance.choice(["small", "large"])
            size = 2 * MIB if kind == "small" else chance.choice([20, 22, 40]) * MIB
            history.segment(num_segments * 100 * MIB, size, kind)
            num_segments += 1
        elif done < 0.5 and history.used:
            address = chance.choice(sorted(history.used))
            if history.used[address]["is_pending"]:
                history.complete_free(address - BASE)
            elif chance.random() < 0.3:
                history.request_free(address - BASE)
            else:
                history.free(address - BASE)
        elif done < 0.55:
            empty = [start for start, held in history.segments.items() if not blocks_in(history, start, held)]
            if empty:
                history.release(chance.choice(empty) - BASE)
        elif history.segments:
            start = chance.choice(sorted(history.segments))
            allocate_in(history, start, chance)
    return history


def blocks_in(history: History, start: int, held: dict[str, int]) -> list[int]:
    return sorted(address for address in history.used if start <= address < start + held["total_size"])


def allocate_in(history: History, start: int, chance: random.Random) -> None:
    held = history.segments[start]
    is_small = held["segment_type"] == "small"
    edges = [start]
    for address in blocks_in(history, start, held):
        edges += [address, address + history.used[address]["size"]]
    edges.append(start + held["total_size"])
    holes = [(low, high - low) for low, high in zip(edges[::2], edges[1::2], strict=True) if high > low]
    if not holes:
        return
    address, room = chance.choice(holes)
    requested = chance.randrange(1, 400_000) if is_small else chance.randrange(MIB + 1, 12 * MIB)
    rounded = -(-requested // 512) * 512
    if rounded > room:
        requested = rounded = room
    is_split = room - rounded >= 512 if is_small else room - rounded > MIB
    history.alloc(address - BASE, requested, rounded if is_split else room)


def test_a_history_that_contradicts_itself_is_counted_not_believed(explained: Explained) -> None:
    history = training_step()
    del history.events[3:5]
    history.events[3]["addr"] += 64 * MIB
    analysis, timeline = explained(history)
    assert timeline.num_unmatched > 0
    assert any("parts of the history are missing" in note for note in analysis.notes)


def test_sizes_that_no_machine_has_do_not_overflow(explained: Explained) -> None:
    history = History()
    for index in range(20):
        history.segment(index << 59, (1 << 59) - 1)
    analysis, _ = explained(history)
    assert analysis.reserved_peak.fragmentation.reserved_bytes == 1 << 62
