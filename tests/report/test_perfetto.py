"""Chrome JSON: counters that add up to the curves, slices that lie inside each other."""

import json
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cuda_history import MIB, History

from memwall.errors import UsageError
from memwall.predict.curve import live_curve
from memwall.report.perfetto import save_perfetto, snapshot_events, trace_events
from memwall.trace.records import ModuleCall, Step, Trace
from memwall.trace.snapshot.read import load_snapshot
from memwall.trace.snapshot.records import Snapshot

Event = dict[str, Any]


def call(module: int, start: int, end: int, backward: tuple[int, int] = (-1, -1)) -> ModuleCall:
    return ModuleCall(
        module=module, start=start, end=end, backward_start=backward[0], backward_end=backward[1], inputs=(), outputs=()
    )


@pytest.fixture
def called(trace: Trace, step: Step) -> Trace:
    """One step whose modules are called; the backward of the blocks overlaps, as it may."""
    calls = (call(0, 0, 3, (3, 5)), call(1, 0, 1, (4, 6)), call(2, 1, 2, (3, 4)))
    return msgspec.structs.replace(trace, steps=(msgspec.structs.replace(step, calls=calls),))


@pytest.fixture
def snapshot(tmp_path: Path) -> Snapshot:
    history = History()
    history.segment(0, 20 * MIB)
    history.alloc(0, 3 * MIB, 3 * MIB)
    history.request_free(0)
    history.oom(64 * MIB, 7 * MIB)
    raw = history.snapshot()
    begin = raw["device_traces"][0][0]["time_us"]
    for stage, name, offset in (("START", "step", 1), ("START", "forward", 2), ("END", "forward", 5), ("END", "x", 6)):
        raw["external_annotations"].append({"device": 0, "time_us": begin + offset, "stage": stage, "name": name})
    raw["external_annotations"].append({"device": 0, "time_us": begin + 20, "stage": "END", "name": "step"})
    file = tmp_path / "in.pickle"
    file.write_bytes(pickle.dumps(raw))
    return load_snapshot(file)


def slices(events: list[Event], kind: str) -> list[tuple[str, float, float, int]]:
    return [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X" and e["cat"] == kind]


# -- traces ------------------------------------------------------------------------------------------------------------


def test_phases_and_operations_are_slices(called: Trace) -> None:
    events = list(trace_events(called))
    assert slices(events, "phase") == [
        ("forward", 0, 500_000, 1),
        ("loss", 500_000, 500, 1),
        ("backward", 500_500, 1_000_000, 1),
        ("optimizer", 1_500_500, 250_000, 1),
        ("other", 1_750_500, 0, 1),
    ]
    operations = [event for event in events if event.get("cat") == "operation"]
    assert len(operations) == 8
    assert operations[1] == {
        "name": "aten.mm.default",
        "cat": "operation",
        "ph": "X",
        "ts": 250_000,
        "dur": 250_000,
        "pid": 1,
        "tid": 2,
        "args": {"operation": 1, "module": "blocks[bold].1", "flops": 0},
    }


def test_modules_nest_and_those_that_only_overlap_get_a_track_of_their_own(called: Trace) -> None:
    events = list(trace_events(called))
    assert slices(events, "module") == [
        ("GPT", 0, 500_500, 10),
        ("blocks.0", 0, 250_000, 10),
        ("blocks[bold].1", 250_000, 250_000, 10),
        ("GPT (backward)", 500_500, 1_000_000, 10),
        ("blocks[bold].1 (backward)", 500_500, 500_000, 10),
        ("blocks.0 (backward)", 1_000_500, 625_000, 11),
    ]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {1: "phases", 2: "operations", 10: "modules", 11: "modules (2)"}


def test_counters_are_the_curve_by_category(called: Trace, step: Step) -> None:
    counters = [event for event in trace_events(called) if event["ph"] == "C"]
    totals = [sum(event["args"].values()) for event in counters]
    curve = live_curve(step.storages, len(step.ops), device="cpu").tolist()
    assert totals == [curve[k] for k in (0, 1, 2, 3, 4, 5, 7, 7)]
    assert counters[3]["args"] == {
        "activation": 200 * MIB,
        "gradient": 88 * MIB,
        "input": 32 * 1024,
        "parameter": 100 * MIB,
        "temporary": 112 * MIB,
    }
    assert (counters[0]["ts"], counters[-1]["ts"]) == (0, 1_750_500)


def test_steps_follow_each_other(trace: Trace) -> None:
    events = list(trace_events(trace))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["first step (cpu, recorded)", "steady step (cpu, recorded)"]
    first_end = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X" and event["pid"] == 1)
    assert min(event["ts"] for event in events if event["ph"] == "X" and event["pid"] == 2) == first_end


def test_without_times_operations_are_counted(called: Trace, tmp_path: Path) -> None:
    (step,) = called.steps
    ops = tuple(msgspec.structs.replace(op, seconds=0.0) for op in step.ops)
    fake = msgspec.structs.replace(called, source="fake", steps=(msgspec.structs.replace(step, ops=ops),))
    save_perfetto(fake, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["otherData"]["microsecond"] == "one operation: no times are known"
    assert [event["ts"] for event in found["traceEvents"] if event.get("cat") == "operation"] == list(range(8))


def test_the_file_is_one_json_object_and_equal_each_time(called: Trace, tmp_path: Path) -> None:
    for name in ("a.json", "b.json"):
        save_perfetto(called, tmp_path / name)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["traceEvents"] == json.loads(json.dumps(list(trace_events(called))))
    assert found["otherData"]["microsecond"] == "measured time of the operations alone"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


def test_a_folder_that_is_missing_is_named(called: Trace, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write the report to .*no/out\.json: No such file or directory"):
        save_perfetto(called, tmp_path / "no" / "out.json")


def test_a_disk_that_fills_up_leaves_no_half_file(
    called: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.json").write_text("what was there before")

    def full(trace: Trace) -> Any:
        yield {"ph": "M"}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("memwall.report.perfetto.trace_events", full)
    with pytest.raises(UsageError, match="No space left on device"):
        save_perfetto(called, tmp_path / "out.json")
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "what was there before"


# -- snapshots ---------------------------------------------------------------------------------------------------------


def test_a_snapshot_s_counters_are_its_curves(snapshot: Snapshot) -> None:
    events = list(snapshot_events(snapshot))
    assert events[0]["args"] == {"name": "GPU 0 (caching allocator)"}
    found: dict[str, list[tuple[float, int]]] = {}
    for event in events:
        if event["ph"] == "C":
            found.setdefault(event["name"], []).append((event["ts"], event["args"]["bytes"] // MIB))
    assert found == {
        "allocated": [(0, 0), (10, 3), (20, 0), (30, 0)],
        "waiting for a stream": [(0, 0), (20, 3), (30, 3)],
        "reserved": [(0, 0), (0, 20), (30, 20)],
        "free, split": [(0, 0), (10, 17), (30, 17)],
        "free, whole segments": [(0, 0), (0, 20), (10, 0), (30, 0)],
    }


def test_device_calls_and_failures_are_marks(snapshot: Snapshot) -> None:
    marks = [(e["name"], e["ts"], e["s"], e["args"]) for e in snapshot_events(snapshot) if e["ph"] == "i"]
    assert marks == [
        ("segment_alloc 20.0 MiB", 0, "t", {"bytes": 20 * MIB}),
        ("out of memory: 64.0 MiB", 30, "p", {"requested_bytes": 64 * MIB, "device_free_bytes": 7 * MIB}),
    ]


def test_record_function_marks_are_slices(snapshot: Snapshot) -> None:
    assert slices(list(snapshot_events(snapshot)), "mark") == [("step", 1, 19, 10), ("forward", 2, 3, 10)]


def test_a_snapshot_is_written_whole(snapshot: Snapshot, tmp_path: Path) -> None:
    save_perfetto(snapshot, tmp_path / "out.json")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["traceEvents"] == json.loads(json.dumps(list(snapshot_events(snapshot))))
    assert found["otherData"]["source"] == "CUDA memory snapshot"
