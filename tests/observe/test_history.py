"""The history of a run's allocator: begun early or said to be late, written when memory runs out, with its marks.

There is no CUDA device where these tests run: `cuda` stands in for torch.cuda, and hands out the simulated allocator's
history as torch would. What a real device does with it is not tested here.
"""

import json
import logging
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_history import MIB, History, frame, simulated_snapshot, varying_requests
from faulty_disk import fill_disk
from torch import nn

from memwall.apply.techniques import allocator as allocator_technique
from memwall.cli.app import main
from memwall.errors import UsageError
from memwall.observe import history
from memwall.observe.history import MemoryHistory, _recording
from memwall.observe.history_marks import Marks, load_marks_beside
from memwall.planning.forecast import Forecast, PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.torch_internals import allocator

LINE = frame("/home/me/train.py", 3, "step")
NO_DEVICE = (
    "history: torch finds no CUDA device here, and the history is that of its allocator; on a CPU memwall can write "
    "the trace of the step it records, which needs `memwall run --budget SIZE --history DIR`"
)


class Cuda:
    """What torch.cuda was asked for, and an observer to be told that memory ran out."""

    def __init__(self) -> None:
        self.recordings: list[dict[str, Any]] = []
        self.calls: list[str] = []
        self.allocated_bytes = 0
        self.observer: Callable[[int, int, int, int], None] = lambda *_: None
        history = History()
        history.segment(0, 20 * MIB)
        history.alloc(0, 8 * MIB, 8 * MIB, [LINE])
        self.snapshot = history.snapshot()

    def run_out(self) -> None:
        self.observer(0, 64 * MIB, 80 << 30, 5 * MIB)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    """A stand-in for a CUDA device; what a test still records when it ends is closed."""
    stand_in = Cuda()

    def attach(observer: Callable[[int, int, int, int], None]) -> None:
        stand_in.observer = observer

    def empty_cache() -> None:
        stand_in.calls.append("empty_cache")

    patched: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "memory_allocated": lambda: stand_in.allocated_bytes,
            "mem_get_info": lambda: (7 * MIB, 80 << 30),
            "current_device": lambda: 0,
            "get_device_name": lambda _: "a stand-in",
            "empty_cache": empty_cache,
        },
        torch.cuda.memory: {
            "empty_cache": empty_cache,
        },
        history: {
            "record_memory_history": lambda **options: stand_in.recordings.append(options),
            "snapshot_of_allocator": lambda: stand_in.snapshot,
        },
        allocator: {"_attach_observer": attach},
    }
    for module, names in patched.items():
        for name, value in names.items():
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("memwall.observe.history._is_observing", False)  # this torch has no observer yet
    yield stand_in
    for recording in tuple(_recording):
        recording.close(completed=False)


def marks_of(path: Path) -> Marks:
    marks = load_marks_beside(path)
    assert marks is not None
    return marks


def test_python_stacks_and_a_bounded_buffer_are_asked_for(cuda: Cuda, tmp_path: Path) -> None:
    history = MemoryHistory(tmp_path, max_entries=1000)
    history.begin()
    assert cuda.recordings == [{"enabled": "all", "context": "all", "stacks": "python", "max_entries": 1000}]
    history.close()
    assert cuda.recordings[1:] == [{"enabled": None}]


def test_a_release_that_tells_nobody_when_memory_runs_out_is_named(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(allocator, "_attach_observer", None)
    history = MemoryHistory(tmp_path)
    history.begin()
    assert caplog.messages[0].startswith("history: a snapshot at the moment when memory runs out is not available with")
    history.close()


def test_too_late_is_said(cuda: Cuda, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cuda.allocated_bytes = 3 * MIB
    history = MemoryHistory(tmp_path)
    history.begin()
    assert caplog.messages == [
        "history: too late to record the beginning: 3.0 MiB are allocated already, and will have no stack; begin "
        "before the model is built"
    ]
    cuda.run_out()
    assert any(note.startswith("the recording began too late") for note in marks_of(tmp_path / "oom-1.pickle").notes)


def test_in_time_nothing_is_said(cuda: Cuda, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MemoryHistory(tmp_path).begin()
    assert caplog.messages == []


def test_running_out_writes_a_snapshot_and_its_marks_without_asking(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    history = MemoryHistory(tmp_path)
    history.begin()
    torch.cuda.empty_cache()
    cuda.run_out()
    path = tmp_path / "oom-1.pickle"
    assert history.written == [path]
    assert pickle.loads(path.read_bytes()) == cuda.snapshot
    marks = marks_of(path)
    assert (marks.reason, marks.requested_bytes) == ("out-of-memory", 64 * MIB)
    assert (marks.total_bytes, marks.free_bytes) == (80 << 30, 5 * MIB)
    assert marks.torch_version == str(torch.__version__)
    assert marks.environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert [phase.name for phase in marks.phases] == ["build"]
    assert [call.name for call in marks.calls] == ["empty_cache"]
    assert cuda.calls == ["empty_cache"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["oom-1.marks.json", "oom-1.pickle"]


def test_phases_are_those_of_the_model_that_trains(cuda: Cuda, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    history = MemoryHistory(tmp_path)
    history.begin()
    history.attach(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 2))
    cuda.run_out()
    names = ["build", "forward", "backward", "optimizer", "other", "eval", "other"]
    phases = marks_of(tmp_path / "oom-1.pickle").phases
    assert [phase.name for phase in phases] == names
    assert [phase.time_us for phase in phases] == sorted(phase.time_us for phase in phases)


@pytest.mark.parametrize(("max_entries", "wrapped"), [(2, True), (3, False)])
def test_a_full_buffer_is_told_from_one_with_room(max_entries: int, wrapped: bool, cuda: Cuda, tmp_path: Path) -> None:
    history = MemoryHistory(tmp_path, max_entries=max_entries)
    history.begin()
    cuda.run_out()
    marks = marks_of(tmp_path / "oom-1.pickle")
    assert (marks.num_entries, marks.wrapped) == (2, wrapped)
    assert ("the buffer of 2 events is full" in " ".join(marks.notes)) == wrapped


def test_a_loop_that_goes_on_after_errors_does_not_fill_the_disk(cuda: Cuda, tmp_path: Path) -> None:
    history = MemoryHistory(tmp_path)
    history.begin()
    for _ in range(10):
        cuda.run_out()
    assert [path.name for path in history.written] == ["oom-1.pickle", "oom-2.pickle", "oom-3.pickle"]


def test_the_end_is_written_if_asked_for_and_all_is_given_back(cuda: Cuda, tmp_path: Path) -> None:
    empty_cache = torch.cuda.empty_cache
    for is_written in (False, True):
        history = MemoryHistory(tmp_path, is_written_at_end=is_written)
        history.begin()
        assert torch.cuda.empty_cache is not empty_cache
        history.close()
        assert (tmp_path / "end.pickle").exists() == is_written
        assert torch.cuda.empty_cache is empty_cache
    assert marks_of(tmp_path / "end.pickle").requested_bytes is None
    cuda.run_out()
    assert not (tmp_path / "oom-1.pickle").exists()


def test_a_run_that_failed_has_no_end(cuda: Cuda, tmp_path: Path) -> None:
    history = MemoryHistory(tmp_path, is_written_at_end=True)
    history.begin()
    history.close(completed=False)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_does_not_hide_the_error(
    cuda: Cuda, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = MemoryHistory(tmp_path)
    history.begin()
    fill_disk(monkeypatch)
    cuda.run_out()
    assert history.written == []
    assert "could not be written" in caplog.messages[0]
    assert list(tmp_path.iterdir()) == []


def test_each_process_of_several_has_files_of_its_own(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    MemoryHistory(tmp_path).begin()
    cuda.run_out()
    assert (tmp_path / "rank1-oom-1.pickle").exists()


def test_explain_and_report_read_the_marks(cuda: Cuda, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = MemoryHistory(tmp_path, max_entries=2)
    history.begin()
    torch.cuda.empty_cache()
    cuda.run_out()
    assert main(["explain", f"{tmp_path}/oom-1.pickle", "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["devices"][0]["notes"]
    assert notes[0].startswith("the buffer of 2 events is full")
    assert notes[1] == "the program emptied the cache; calls: 1"


@pytest.mark.parametrize(
    ("name", "argument"),
    [("_set_allocator_settings", "expandable_segments:True"), ("set_per_process_memory_fraction", 0.5)],
)
@pytest.mark.parametrize("is_before", [True, False])
def test_settings_are_not_compared_where_they_changed_meanwhile(
    name: str,
    argument: object,
    is_before: bool,
    cuda: Cuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GIVEN a call that a snapshot has no event for THEN only what comes after it is one recording."""
    monkeypatch.setattr(torch.cuda.memory, name, lambda *_: None)
    history = MemoryHistory(tmp_path)
    history.begin()
    cuda.snapshot = simulated_snapshot(varying_requests())[0]
    at_us = time.time_ns() // 1000 + (10**9 if is_before else -(10**9))
    for event in cuda.snapshot["device_traces"][0]:
        event["time_us"] = at_us
    getattr(torch.cuda.memory, name)(argument)
    cuda.run_out()
    assert main(["explain", f"{tmp_path}/oom-1.pickle", "--json"]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    refused = (
        f"no other allocator settings were compared: they were changed while it was recorded: {name}({argument!r})"
    )
    assert (device["settings"] is None, refused in device["notes"]) == (not is_before, not is_before)
    limited = f"the program limited its memory, and no comparison of settings does: {name}({argument!r})"
    assert (limited in device["notes"]) == (name == "set_per_process_memory_fraction")


def test_other_files_in_the_place_of_marks_are_named(tmp_path: Path) -> None:
    (tmp_path / "s.marks.json").write_text('{"schema": "memwall.marks/1"}')
    with pytest.raises(UsageError, match="does not hold its marks: Object missing"):
        load_marks_beside(tmp_path / "s.pickle")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot make the folder .*/file: File exists; choose another"):
        MemoryHistory(tmp_path / "file")


def test_the_callback_sets_the_plans_settings_before_the_recording_starts_cuda(
    cuda: Cuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = pytest.importorskip("memwall.integrations.trainer", reason="needs transformers")
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(
        allocator_technique, "require_cuda_setting", lambda setting: found.append((setting, len(cuda.recordings)))
    )
    peak = PeakBytes(allocated_bytes=1, process_bytes=1)
    forecast = Forecast(
        device="cuda", source="fake", fits=True, budget_bytes=1, margin_bytes=0, peak=peak, phases={},
        step_seconds=None, not_modelled=(),
        actions=(AllocatorReuse(policy="cuda", cuda_setting="expandable_segments:True"),),
    )  # fmt: skip
    plan = Plan(model_fingerprint="", trace_hash="", micro_batch=1, num_micro_batches=1, forecast=forecast)
    trainer.MemwallCallback(plan=plan, history=tmp_path)
    assert found == [("expandable_segments:True", 0)]
    assert len(cuda.recordings) == 1


# -- a machine without CUDA, which needs no stand-in -------------------------------------------------------------------


class TestOnACpu:
    def test_without_anything_to_write_it_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError) as raised:
            MemoryHistory(tmp_path).begin()
        assert str(raised.value) == NO_DEVICE

    def test_the_callback_refuses_it(self, tmp_path: Path) -> None:
        trainer = pytest.importorskip("memwall.integrations.trainer", reason="needs transformers")
        with pytest.raises(UsageError, match="no CUDA device here"):
            trainer.MemwallCallback(budget="1GiB", history=tmp_path)

    @pytest.mark.slow
    @pytest.mark.parametrize("error", ["MemoryError()", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")'])
    def test_the_recorded_step_is_written_when_memory_runs_out(
        self, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """GIVEN a script that fails in its third step WHEN run with --history THEN the first step is there to read."""
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(_SCRIPT.replace("ERROR", error))
        status = main(["run", "--budget", "8GiB", "--disk", str(tmp_path), "--history", "found", "train.py"])
        assert status == 3
        assert [path.name for path in Path("found").iterdir()] == ["oom.trace"]
        assert main(["explain", "found/oom.trace"]) == 0
        written = tmp_path / "found" / "oom.trace"
        said = f"memwall: history: memory ran out; the recorded step was written to {written}"
        assert said in capsys.readouterr().err.splitlines()

    @pytest.mark.slow
    def test_another_error_writes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        Path("train.py").write_text(_SCRIPT.replace("ERROR", "ValueError()"))
        assert main(["run", "--budget", "8GiB", "--disk", str(tmp_path), "--history", "found", "train.py"]) == 1
        assert list(Path("found").iterdir()) == []

    def test_before_a_step_was_recorded_it_says_so(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            MemoryHistory(tmp_path).failed(MemoryError(), None)
        assert caplog.messages == [
            "history: memory ran out before a step was recorded; there is nothing to write, give a larger "
            "budget to see a step recorded"
        ]


_SCRIPT = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    if step == 2:
        raise ERROR
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
