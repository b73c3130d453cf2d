"""Who held the peak of a snapshot, what pinned and stranded memory, and what its notes must say."""

from pathlib import Path

import pytest
from cuda_history import BASE, MIB, History
from snapshot_runs import Explained, imported, training_step

from memwall.predict.curve import Share
from memwall.predict.snapshot.analysis import OutOfMemory, Pin, analyse_device, devices_of
from memwall.predict.snapshot.device_history import recording_of
from memwall.predict.snapshot.timeline import Fragmentation
from memwall.predict.snapshot.user_line import line_of
from memwall.trace.snapshot.records import Frame


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


def test_without_a_history_the_end_stands_for_the_peak(tmp_path: Path) -> None:
    raw = training_step().snapshot()
    raw["device_traces"] = [[]]
    analysis, timeline = analyse_device(imported(raw, tmp_path), 0)
    assert len(timeline.active_bytes) == 1
    assert analysis.peak.fragmentation == analysis.final.fragmentation
    assert analysis.by_line[0] == Share(name="work/model.py:7 forward", num_bytes=8 * MIB)
    assert analysis.notes[0].startswith("no history was recorded, so the state at the end stands for the peak; call ")


def test_notes_say_what_changes_the_meaning(tmp_path: Path) -> None:
    history = History()
    history.segment(0, 20 * MIB)
    history.events[0]["pool_id"] = (0, 3)
    raw = history.snapshot()
    raw["allocator_settings"]["roundup_power2_divisions"] = {"1": 0, "256": 4}
    raw["device_traces"][0].append({"action": "later", "addr": 0, "size": 0})
    analysis, _ = analyse_device(imported(raw, tmp_path), 0)
    assert analysis.notes == (
        "some memory belongs to private pools (CUDA graphs, MemPool), which share nothing",
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
        (
            (Frame("/src/memwall/memwall/trace/step_recorder.py", 3, "f"), Frame("/src/memwall/t.py", 4, "g")),
            "memwall/t.py:4 g",
        ),
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
    assert [held.num_bytes for held in recording.start.ranges] == [20 * MIB, 2 * MIB, 30 * MIB]
    assert [(block.address - BASE, block.requested_bytes) for block in recording.start.blocks] == [
        (8 * MIB, 8 * MIB),
        (100 * MIB, 100),
    ]
    assert recording.exact_bytes == {0: 8 * MIB}
