"""A script that dies of too little memory goes on from its last committed step, under a plan for less; not for ever."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from memwall.cli.app import main
from memwall.units import format_bytes

SCRIPT = str(Path(__file__).parent.parent / "scripts" / "runs_out_once.py")


def run(folder: Path, *arguments: str, resume: bool = True) -> int:
    options = ["--budget", "1TiB", "--checkpoint", str(folder / "steps"), "--disk", str(folder)]
    return main(["run", *options, *(["--resume"] if resume else []), SCRIPT, *arguments])


def test_it_goes_on_within_less(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GIVEN a run that fails in its third step WHEN it is resumed THEN it ends with the same weights."""
    assert main(["run", "--budget", "1TiB", SCRIPT, "passes", str(tmp_path / "expected")]) == 0
    assert run(tmp_path, "fails", "unused", resume=False) == 3
    error = capfd.readouterr().err
    assert "memwall: out of memory in the forward of step 3: 1.0 MiB could not be had while the process held" in error
    assert "the same command with --resume plans for that, attempt 1 of 3" in error
    assert run(tmp_path, "passes", str(tmp_path / "found")) == 0
    within_bytes = json.loads((tmp_path / "steps" / "out-of-memory.json").read_text())["within_bytes"]
    assert f"budget {format_bytes(within_bytes)}" in " ".join(capfd.readouterr().err.split())
    expected, found = load_file(tmp_path / "expected"), load_file(tmp_path / "found")
    assert all((expected[name] == found[name]).all() for name in expected)


def test_attempts_are_bounded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """GIVEN a run that failed once more than it may WHEN it is resumed THEN it is refused."""
    folder = tmp_path / "steps"
    folder.mkdir()
    (folder / "out-of-memory.json").write_text(f'{{"budget_bytes":{1 << 40},"within_bytes":1024,"num_failures":4}}')
    assert run(tmp_path, "passes", "unused") == 2
    assert "has run out of memory 4 times under a budget of 1.00 TiB, the last time" in capfd.readouterr().err
