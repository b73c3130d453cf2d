"""Chrome JSON: counters that add up to the curves, slices that lie inside each other."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cuda_history import MIB

from memwall.errors import UsageError
from memwall.predict.curve import live_curve
from memwall.report.perfetto import save_perfetto, trace_events
from memwall.trace.records import ModuleCall, Step, Trace

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


def slices(events: list[Event], kind: str) -> list[tuple[str, float, float, int]]:
    return [(e["name"], e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X" and e["cat"] == kind]


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
