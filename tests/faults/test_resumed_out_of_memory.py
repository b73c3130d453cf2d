"""A script that dies of too little memory goes on from its last committed step, under a plan for less; not for ever."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from memwall.units import format_bytes

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "runs_out_once.py")


def run(folder: Path, *arguments: str, resume: bool = True) -> tuple[int, str]:
    """In a process of its own, of which nothing but the run is in memory; its status and what it said."""
    options = ["--budget", "1TiB", "--checkpoint", str(folder / "steps"), "--disk", str(folder)]
    command = [sys.executable, "-m", "memwall", "run", *options, *(["--resume"] if resume else []), SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_it_goes_on_within_less(tmp_path: Path) -> None:
    """GIVEN a run that fails in its third step WHEN it is resumed THEN it ends with the same weights."""
    subprocess.run([sys.executable, SCRIPT, "passes", str(tmp_path / "expected")], check=True)
    status, error = run(tmp_path, "fails", "unused", resume=False)
    assert status == 3
    assert "memwall: out of memory in the forward of step 3: 1.0 MiB could not be had while the process held" in error
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


@pytest.mark.slow
def test_attempts_are_bounded(tmp_path: Path) -> None:
    """GIVEN a run that failed once more than it may WHEN it is resumed THEN it is refused."""
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "out-of-memory.json").write_text(f'{{"budget_bytes":{1 << 40},"within_bytes":1024,"num_failures":4}}')
    status, error = run(tmp_path, "passes", "unused")
    assert status == 2
    assert "has run out of memory 4 times under a budget of 1.00 TiB, the last time" in error
