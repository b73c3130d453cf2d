"""The sampling from outside: what a tree of processes holds is counted once."""

import os
import subprocess
import sys
from pathlib import Path

import compat  # noqa: F401, puts tests/compat on the path
import psutil
import pytest
from tree_memory import TimeLimitError, _resident_bytes, observed

pytestmark = pytest.mark.slow

_MIB = 1 << 20
_STARTS_OTHERS = """
import subprocess, time
held = bytearray(200 << 20)
for _ in range(300):
    subprocess.run(["true"])
"""


def test_a_child_that_still_runs_in_its_parents_memory_is_not_counted_twice() -> None:
    parent = psutil.Popen([sys.executable, "-S", "-c", _STARTS_OTHERS], env=os.environ)
    samples = []
    while parent.poll() is None:
        samples.append(_resident_bytes(parent))
    assert 200 * _MIB < max(samples) < 300 * _MIB


def test_a_child_of_its_own_is_counted() -> None:
    code = "held = bytearray(50 << 20); print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        me = psutil.Process()
        assert _resident_bytes(me) - me.memory_info().rss > 50 * _MIB
    finally:
        child.communicate(b"\n")


def test_a_command_that_the_time_limit_ends_has_no_result(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("while True:\n    pass\n")
    with pytest.raises(TimeLimitError, match=r"endless\.py was ended by the time limit after"):
        observed(tmp_path / "endless.py", folder=tmp_path, limit_seconds=0.7)
