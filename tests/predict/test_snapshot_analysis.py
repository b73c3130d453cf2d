"""A snapshot's history rebuilt: the curves of the run that wrote it, and who held its peak."""

import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cuda_history import BASE, MIB, History, frame

from memwall.predict.curve import Share
from memwall.predict.snapshot_analysis import DeviceAnalysis, OutOfMemory, Pin, analyse_device, devices_of, line_of
from memwall.predict.snapshot_replay import recording_of
from memwall.predict.snapshot_timeline import Fragmentation, Timeline
from memwall.trace.snapshot import load_snapshot
from memwall.trace.snapshot_records import Frame, Snapshot

TRAIN = frame("/home/me/work/train.py", 42, "step")
MODEL = frame("/home/me/work/model.py", 7, "forward")
LINEAR = frame("/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py", 134, "forward")
KERNEL = frame("/pytorch/aten/src/ATen/native/cuda/Linear.cpp", 0, "at::linear")

Explained = Callable[[History], tuple[DeviceAnalysis, Timeline]]


def imported(raw: object, folder: Path) -> Snapshot:
    file = folder / "snapshot.pickle"
    file.write_bytes(pickle.dumps(raw))
    return load_snapshot(file)


@pytest.fixture
def explained(tmp_path: Path) -> Explained:
    def explain(history: History) -> tuple[DeviceAnalysis, Timeline]:
        return analyse_device(imported(history.snapshot(), tmp_path), 0)

    return explain


def assert_true(timeline: Timeline, history: History) -> None:
    found = np.stack([timeline.allocated_bytes, timeline.active_bytes, timeline.reserved_bytes], axis=1)
    assert found.tolist() == [list(row) for row in history.truth]
    free = timeline.split_free_bytes + timeline.expandable_free_bytes + timeline.idle_bytes
    assert (free == timeline.reserved_bytes - timeline.active_bytes).all()
    assert timeline.num_unmatched == 0


def training_step() -> History:
    """20 MiB for two layers, 2 MiB for small tensors, then a 30 MiB segment of which 28 are used at the peak."""
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 8 * MIB, 8 * MIB, [KERNEL, LINEAR, MODEL, TRAIN])
    history.alloc(8 * MIB, 8 * MIB, 8 * MIB, [LINEAR, MODEL, TRAIN])
    history.segment(100 * MIB, 2 * MIB, "small")
    history.alloc(100 * MIB, 100, 512, [TRAIN])
    history.segment(200 * MIB, 30 * MIB)
    history.alloc(200 * MIB, 28 * MIB, 28 * MIB, [TRAIN])
    history.free(0)
    history.free(200 * MIB)
    return history


# -- curves ------------------------------------------------------------------------------------------------------------


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


# -- the peak ----------------------------------------------------------------------------------------------------------


def test_the_peak_is_held_by_the_users_lines(explained: Explained) -> None:
    analysis, _ = explained(training_step())
    assert analysis.by_line == (
        Share(name="work/train.py:42 step", num_bytes=28 * MIB + 512),
        Share(name="work/model.py:7 forward", num_bytes=16 * MIB),
    )
    assert analysis.by_category == (Share(name="unknown", num_bytes=44 * MIB + 512),)
    assert analysis.peak.position == 7
    assert analysis.peak.fragmentation == Fragmentation(
        reserved_bytes=52 * MIB,
        allocated_bytes=44 * MIB + 512,
        pending_bytes=0,
        split_free_bytes=8 * MIB - 512,
        expandable_free_bytes=0,
        idle_bytes=0,
    )
    assert analysis.peak.fragmentation.share == pytest.approx(1 - (44 * MIB + 512) / (52 * MIB))
    assert analysis.peak.largest_free_bytes == 4 * MIB


def test_categories_are_kept_where_they_were_written(explained: Explained) -> None:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 3 * MIB, 3 * MIB, category="parameter")
    history.alloc(3 * MIB, 5 * MIB, 5 * MIB, category="activation")
    analysis, _ = explained(history)
    assert analysis.by_category == (
        Share(name="activation", num_bytes=5 * MIB),
        Share(name="parameter", num_bytes=3 * MIB),
    )
    assert analysis.by_line == (Share(name="(no stack recorded)", num_bytes=8 * MIB),)


def test_what_pins_a_segment_is_named(explained: Explained) -> None:
    history = training_step()
    history.segment(300 * MIB, 20 * MIB)
    analysis, _ = explained(history)
    assert analysis.reserved_peak.fragmentation.reserved_bytes == 72 * MIB
    assert analysis.pins == (
        Pin(address=BASE, num_bytes=20 * MIB, used_bytes=8 * MIB, num_blocks=1, line="work/model.py:7 forward"),
        Pin(address=BASE + 100 * MIB, num_bytes=2 * MIB, used_bytes=512, num_blocks=1, line="work/train.py:42 step"),
    )
    assert analysis.num_pinned == 2


def test_an_allocation_that_failed_is_shown_with_what_lay_free(explained: Explained) -> None:
    history = training_step()
    history.oom(64 * MIB, 5 * MIB)
    analysis, _ = explained(history)
    (found,) = analysis.out_of_memory
    assert found == OutOfMemory(
        position=11,
        requested_bytes=64 * MIB,
        device_free_bytes=5 * MIB,
        fragmentation=Fragmentation(
            reserved_bytes=52 * MIB,
            allocated_bytes=8 * MIB + 512,
            pending_bytes=0,
            split_free_bytes=14 * MIB - 512,
            expandable_free_bytes=0,
            idle_bytes=30 * MIB,
        ),
    )


def test_retries_are_counted(explained: Explained) -> None:
    history = training_step()
    history.release(200 * MIB)
    history.segment(400 * MIB, 40 * MIB)
    history.alloc(400 * MIB, 40 * MIB, 40 * MIB)
    history.free(400 * MIB)
    history.release(400 * MIB)
    analysis, _ = explained(history)
    assert analysis.num_retries == 1
    assert analysis.notes == (
        "the device ran out (retries: 1): cached segments were given back to get new ones, which takes time",
    )


def test_without_a_history_the_end_stands_for_the_peak(tmp_path: Path) -> None:
    raw = training_step().snapshot()
    raw["device_traces"] = [[]]
    analysis, timeline = analyse_device(imported(raw, tmp_path), 0)
    assert len(timeline.active_bytes) == 1
    assert analysis.peak.fragmentation == analysis.final.fragmentation
    assert analysis.by_line[0] == Share(name="work/model.py:7 forward", num_bytes=8 * MIB)
    assert analysis.notes[0].startswith("no history was recorded, so the state at the end stands for the peak; call ")


def test_notes_say_what_changes_the_meaning(tmp_path: Path) -> None:
    history = History(has_times=False)
    history.segment(0, 20 * MIB)
    history.events[0]["pool_id"] = (0, 3)
    raw = history.snapshot()
    raw["allocator_settings"]["roundup_power2_divisions"] = {"1": 0, "256": 4}
    raw["device_traces"][0].append({"action": "later", "addr": 0, "size": 0})
    analysis, _ = analyse_device(imported(raw, tmp_path), 0)
    assert analysis.notes == (
        "some memory belongs to private pools (CUDA graphs, MemPool), which share nothing",
        "this version of torch noted no times; events are counted instead",
        "sizes were rounded up by roundup_power2_divisions; blocks that are gone count without it",
        "events left out because this memwall does not know them: later",
    )


def test_devices_are_told_apart(tmp_path: Path) -> None:
    raw = training_step().snapshot()
    other = History()
    other.segment(0, 200 * MIB)
    for segment in other.snapshot()["segments"]:
        segment["device"] = 2
        raw["segments"].append(segment)
    raw["device_traces"] += [[], other.events]
    snapshot = imported(raw, tmp_path)
    assert devices_of(snapshot) == (2, 0)
    assert analyse_device(snapshot, 2)[0].final.fragmentation.idle_bytes == 200 * MIB
    assert analyse_device(snapshot, 0)[0].peak.fragmentation.active_bytes == 44 * MIB + 512


@pytest.mark.parametrize(
    ("stack", "line"),
    [
        ((), "(no stack recorded)"),
        ((Frame("/a/b/c.py", 3, "f"),), "b/c.py:3 f"),
        ((Frame("x/torch/nn/linear.py", 3, "f"), Frame("t.py", 4, "g"), Frame("u.py", 5, "h")), "t.py:4 g"),
        ((Frame("C:\\run\\torch\\nn.py", 3, "f"), Frame("C:\\run\\t.py", 4, "g")), "run/t.py:4 g"),
        ((Frame("a.cpp", 0, "at::add"), Frame("??", 0, "??")), "a.cpp:0 at::add"),
        ((Frame("??", 0, "?"), Frame("<frozen runpy>", 1, "r"), Frame("/t.py", 2, "g")), "/t.py:2 g"),
        ((Frame("none", 0, "<built-in function linear>"), Frame("none", 0, "t.py(8): step")), "t.py(8): step"),
        ((Frame("none", 0, "torch/nn/modules/linear.py(130): forward"),), "torch/nn/modules/linear.py(130): forward"),
    ],
)
def test_the_line_of_a_stack(stack: tuple[Frame, ...], line: str) -> None:
    assert line_of(stack) == line


def test_the_recording_is_a_plain_sequence_with_its_start(tmp_path: Path) -> None:
    history = training_step()
    history.forget()
    history.alloc(0, 8 * MIB, 8 * MIB)
    recording = recording_of(imported(history.snapshot(), tmp_path), 0)
    assert [event.action for event in recording.events] == ["alloc"]
    assert [held.num_bytes for held in recording.ranges] == [20 * MIB, 2 * MIB, 30 * MIB]
    assert [(block.address - BASE, block.requested_bytes) for block in recording.blocks] == [
        (8 * MIB, 8 * MIB),
        (100 * MIB, 100),
    ]
    assert recording.exact_bytes == {0: 8 * MIB}
