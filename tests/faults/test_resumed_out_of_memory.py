"""A script that dies of too little memory goes on from its last committed step, under a plan for less; not for ever."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from warm_python import warm_python

from memwall.checkpoint.resumption import open_checkpoint
from memwall.cli.app import main
from memwall.errors import OutOfMemoryError, UsageError
from memwall.integrations.launcher import run_script
from memwall.session.next_budget import note_failure, read_next_budget
from memwall.session.session import Session
from memwall.units import format_bytes

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "runs_out_once.py")


def options(folder: Path) -> list[str]:
    return ["--budget", "1TiB", "--checkpoint", str(folder / "steps"), "--disk", str(folder)]


def run(folder: Path, *arguments: str, resume: bool = True, report: Path | None = None) -> tuple[int, str]:
    """In a process of its own, of which nothing but the run is in memory; its status and what it said."""
    further = [*(["--resume"] if resume else []), *(["--report", str(report)] if report else [])]
    done = warm_python().run("-m", "memwall", "run", *options(folder), *further, SCRIPT, *arguments)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_it_goes_on_within_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a run that fails in its third step WHEN it is resumed THEN it ends with the same weights."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process, which trains undisturbed
    monkeypatch.setattr(sys, "argv", [SCRIPT, "passes", str(tmp_path / "expected")])
    runpy.run_path(SCRIPT)
    status, error = run(tmp_path, "fails", "unused", resume=False, report=tmp_path / "report.json")
    assert status == 3
    page = (tmp_path / "report.html").read_text()
    for told in ("Out of memory in forward", "1.0 MiB could not be had", "runs_out_once.py:", "Foreseen and measured"):
        assert told in page
    assert f"memwall run --resume {' '.join(options(tmp_path))} --report" in page
    assert "memwall: out of memory in the forward of step 3: 1.0 MiB could not be had while the process held" in error
    assert re.search(
        r"; the plan foresees [\d.]+ [MG]iB, with the most memory at \w+ in .*: [\d.]+ .iB of tensors", error
    )
    assert "the same command with --resume plans for that, attempt 1 of 3" in error
    status, error = run(tmp_path, "passes", str(tmp_path / "found"))
    assert status == 0
    said = " ".join(error.split())
    assert re.search(r"steps: step 2 was read and verified, [\d.]+ [KM]iB in [\d.]+ [mu]?s; the run continues", said)
    assert re.search(
        r"\d commits? of [\d.]+ [KM]iB, each [\d.]+ [mu]?s to write and [\d.]+ [mu]?s to record and sync", said
    )
    within_bytes = json.loads((tmp_path / "steps" / "out-of-memory.json").read_text())["within_bytes"]
    assert f"margin in a budget of {format_bytes(within_bytes, rounding='down')}" in said
    expected, found = load_file(tmp_path / "expected"), load_file(tmp_path / "found")
    assert all((expected[name] == found[name]).all() for name in expected)


@pytest.mark.parametrize("is_committed", [True, False])
def test_what_has_no_smaller_plan_goes_on_from_what_is_committed(tmp_path: Path, is_committed: bool) -> None:
    failure = OutOfMemoryError("out", phase="forward", asked_bytes=1, held_bytes=1)
    told = str(note_failure(tmp_path, 5000, failure, num_before=0, is_committed=is_committed))
    assert ("go on from the last committed step by the same command with --resume" in told) == is_committed
    assert read_next_budget(tmp_path, 5000) is None


def test_a_rank_leaves_it_where_all_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a rank that commits into a folder of its own WHEN it fails THEN what follows is for all, and once."""
    script = tmp_path / "fails.py"
    script.write_text(
        "from memwall.errors import OutOfMemoryError\n"
        "raise OutOfMemoryError('out', phase='forward', asked_bytes=1, held_bytes=1, next_budget_bytes=1000)\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    checkpoint = open_checkpoint(tmp_path / "steps", every=1, is_resuming=False, meet=lambda: None)
    with pytest.raises(OutOfMemoryError, match="--resume plans for that, attempt 3 of 3"):
        run_script(str(script), [], Session(budget_bytes=5000), checkpoint=checkpoint, num_failures=2)
    found = read_next_budget(tmp_path / "steps", 5000)
    assert found is not None
    assert (found.within_bytes, found.num_failures) == (1000, 3)


def test_ranks_that_fail_together_are_one_failure(tmp_path: Path) -> None:
    """GIVEN ranks that can have less and more WHEN the one with less is first THEN it still counts, and once."""
    for number in (1, 2):
        for within_bytes in (1000, 2000):
            failure = OutOfMemoryError(
                "out", phase="forward", asked_bytes=0, held_bytes=0, next_budget_bytes=within_bytes // number
            )
            said = str(note_failure(tmp_path, 5000, failure, num_before=number - 1))
            assert f"attempt {number} of 3" in said
        left = read_next_budget(tmp_path, 5000)
        assert left is not None
        assert (left.within_bytes, left.num_failures) == (1000 // number, number)
    said = str(note_failure(tmp_path, 5000, failure, num_before=3))
    assert said == "out"
    with pytest.raises(UsageError, match="has run out of memory 4 times"):
        read_next_budget(tmp_path, 5000)


def test_attempts_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN a run that failed once more than it may WHEN it is resumed THEN it is refused."""
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "out-of-memory.json").write_text(f'{{"budget_bytes":{1 << 40},"within_bytes":1024,"num_failures":4}}')
    assert main(["run", *options(tmp_path), "--resume", SCRIPT, "passes", "unused"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has run out of memory 4 times under a budget of 1.00 TiB, the last time" in said
