"""`make gpu-truth`, as far as a machine without a GPU goes: it refuses, and its order, tables and targets are right."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import gpu_child
import gpu_device
import gpu_truth_case
import pytest
import torch

ROOT = Path(__file__).parents[2]
Case = tuple[str, str, str]


@pytest.fixture(scope="module")
def gpu_truth() -> ModuleType:
    """The benchmark's module."""
    return import_module("gpu_truth")


def row(predicted_bytes: int, measured_bytes: int, margin_bytes: int = 0) -> dict[str, Any]:
    names = ("allocated_bytes", "reserved_bytes", "process_bytes")
    predicted = dict.fromkeys(names, predicted_bytes) | {"margin_bytes": margin_bytes}
    return {"family": "gpt2", "predicted": predicted, "measured": dict.fromkeys(names, measured_bytes)}


def test_refuses_without_a_gpu(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu_truth.py", "--output", str(output)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert "nothing was measured, nothing written" in done.stderr
    assert not output.exists()


def test_each_case_comes_once_and_every_family_comes_early(gpu_truth: ModuleType) -> None:
    found = list(gpu_truth.cases())
    assert len(set(found)) == len(found) == 12 * 6 * 3
    early = found[:24]
    assert {family for family, _, _ in early} == set(gpu_truth.FAMILIES)
    assert {precision for _, precision, _ in early} == set(gpu_truth.PRECISIONS)
    assert {optimizer for _, _, optimizer in early} == set(gpu_truth.OPTIMIZERS)


def test_targets_that_are_missed_are_named(gpu_truth: ModuleType) -> None:
    right = gpu_truth.tables([row(1000, 1000)] * 20)
    assert gpu_truth.missed(right) == []
    short = gpu_truth.tables([row(900, 1000, margin_bytes=50)] * 20)
    assert short["false_fits_share"] == 1.0
    assert [text.split(" >")[0] for text in gpu_truth.missed(short)] == [
        "allocated median 10.0%",
        "reserved median 10.0%",
        "reserved p95 10.0%",
        "false fits 100.0%",
    ]
    covered = gpu_truth.tables([row(900, 1000, margin_bytes=100)] * 20)
    assert covered["false_fits_share"] == 0.0


def test_a_handful_of_rows_meets_no_target(gpu_truth: ModuleType) -> None:
    assert gpu_truth.missed(gpu_truth.tables([row(1000, 1000)] * 3)) == [
        "allocated: 3 rows are too few",
        "reserved: 3 rows are too few",
    ]


@pytest.fixture
def checkout(gpu_truth: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit with one file in it, which the benchmark takes for its repository."""
    (tmp_path / "code.py").write_text("pass\n")
    author = ["-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "m"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    monkeypatch.setattr(gpu_truth, "ROOT", tmp_path)
    return tmp_path


@pytest.fixture
def on_a_gpu(gpu_truth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As far as `main` can tell: the parts that need one answer what this says."""
    found: dict[str, Any] = {
        "histories": {"failures": [], "not_reached": [], "l1": [], "l2": []},
        "caps": {"rows": [], "failures": [], "not_reached": []},
    }
    monkeypatch.setattr(gpu_truth, "record_histories", lambda runs, folder, snapshots, budget: found["histories"])
    monkeypatch.setattr(gpu_truth, "measure_caps", lambda cases, used_bytes, budget, is_tiny: found["caps"])
    monkeypatch.setattr(gpu_truth, "with_measured_context", lambda hardware: hardware)
    monkeypatch.setattr(gpu_truth, "used_bytes", lambda: 0)
    monkeypatch.setattr(gpu_device.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_device.torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(sys, "argv", ["gpu_truth.py"])
    return found


class Answers:
    """Stands in for a child: answers at once, or fails where it is told to."""

    broken: Case | None = None
    asked: list[Case]
    ended = 0

    def __init__(self, arguments: tuple[str, ...]) -> None:
        assert arguments[4:7] == ("--device", "h200", "--context-bytes")
        self._case = (arguments[1], arguments[2], arguments[3])

    def answer(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        Answers.asked.append(self._case)
        if self._case == Answers.broken:
            raise gpu_child.CaseFailed("out of memory")
        return row(1000, 1000) | dict(zip(("family", "precision", "optimizer"), self._case, strict=True))

    def end(self) -> None:
        Answers.ended += 1


@pytest.fixture
def answers(gpu_truth: ModuleType, monkeypatch: pytest.MonkeyPatch) -> type[Answers]:
    Answers.asked, Answers.broken, Answers.ended = [], None, 0
    monkeypatch.setattr(gpu_truth, "Child", Answers)
    return Answers


@pytest.mark.usefixtures("on_a_gpu")
def test_a_second_call_goes_on_where_the_first_one_ended(
    gpu_truth: ModuleType, checkout: Path, answers: type[Answers], capsys: pytest.CaptureFixture[str]
) -> None:
    """GIVEN a case that fails WHEN the benchmark is called again THEN that one alone is run again."""
    answers.broken = broken = next(gpu_truth.cases())
    assert gpu_truth.main() == 1
    assert f"215 of 216 cases; {' '.join(broken)} failed\n" in capsys.readouterr().out
    assert len(answers.asked) == 216
    written = checkout / "benchmarks" / "results" / "nvidia-h200" / "prediction.json"
    document = json.loads(written.read_text())
    assert len(document["rows"]) == 215
    assert document["not_reached"] == [" ".join(broken)]
    assert document["tables"]["reserved"]["memory_saved_share"] > 0.9
    answers.asked.clear()
    gpu_truth.main()
    assert answers.asked == [broken]
    (checkout / "code.py").write_text("changed\n")
    answers.asked.clear()
    gpu_truth.main()
    assert len(answers.asked) == 216


@pytest.mark.usefixtures("on_a_gpu", "checkout")
def test_when_the_list_of_cases_changes_no_earlier_row_stands(
    gpu_truth: ModuleType, answers: type[Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_truth.main()
    monkeypatch.setattr(gpu_truth, "zoo_sha256", lambda: "another")
    answers.asked.clear()
    gpu_truth.main()
    assert len(answers.asked) == 216


@pytest.mark.usefixtures("on_a_gpu")
def test_what_there_is_no_time_for_is_listed(
    gpu_truth: ModuleType, checkout: Path, answers: type[Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_truth.py", "--seconds", "0"])
    assert gpu_truth.main() == 1
    document = json.loads((checkout / "benchmarks" / "results" / "nvidia-h200" / "prediction.json").read_text())
    assert document["not_reached"] == [" ".join(case) for case in gpu_truth.cases()]
    assert answers.asked == []
    assert answers.ended > 0


def test_what_is_not_exact_fails_the_benchmark(gpu_truth: ModuleType) -> None:
    histories = {
        "failures": ["history of cross-stream failed"],
        "l1": [{"name": "a", "difference": None}, {"name": "b", "difference": "event 3"}],
        "l2": [{"name": "a", "under": "x:1", "differences": ["reserved_bytes: measured 1, simulated 2"]}],
    }
    assert gpu_truth.failed(histories, {"failures": ["cap of t5 failed"]}) == [
        "history of cross-stream failed",
        "cap of t5 failed",
        "b: no L1 re-simulation: event 3",
        "a under x:1: no L2 equality: reserved_bytes: measured 1, simulated 2",
    ]


def test_a_phantom_hears_that_positions_do_not_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a device on which all positions read as 0 THEN transformers makes no mask for packed sequences of them."""
    from transformers import masking_utils

    heard = []

    def trained(*_: str) -> None:
        heard.append(masking_utils.find_packed_sequence_indices(torch.zeros(2, 4, dtype=torch.int64)))
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(gpu_truth_case, "is_phantom", lambda: True)
    monkeypatch.setattr(gpu_truth_case, "_trained", trained)
    assert gpu_truth_case.measured("gpt2", "float32", "adamw-fused", used_bytes=0) == {"outcome": "out of memory"}
    assert heard == [None]
    assert masking_utils.find_packed_sequence_indices(torch.zeros(2, 4, dtype=torch.int64)) is not None
