"""The processes in which tests of the phantom device run: one that fails or hangs does so by its name."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TWO_FAIL = """
import time

import pytest


@pytest.mark.phantom(numbers=False)
def test_fails():
    assert 1 == 2


@pytest.mark.phantom(numbers=False)
@pytest.mark.timeout(3)
def test_hangs():
    time.sleep(120)


@pytest.mark.phantom(numbers=False)
def test_goes_on():
    pass
"""


@pytest.mark.phantom(numbers=False)
def test_one_that_fails_and_one_that_hangs_are_named_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a watchdog, whose thread no fork has, as in this project's settings THEN failures end at once."""
    file = tmp_path / "test_three.py"
    file.write_text(TWO_FAIL)
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    options = ("-q", "-p", "phantom_processes", "-o", "faulthandler_timeout=600", file.name)
    command = (sys.executable, "-m", "pytest", *options)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "FAILED test_three.py::test_fails - assert 1 == 2" in done.stdout
    assert "FAILED test_three.py::test_hangs - Failed: Timeout (>3.0s)" in done.stdout
    assert "2 failed, 1 passed" in done.stdout
