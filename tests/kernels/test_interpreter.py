"""The kernels themselves, on the CPU, in Triton's interpreter: in a process of their own, as importing chooses it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# What the reference has to pass, and the kernels as well.
SHARED = ("glu", "pack")
# With what is for kernels alone, by operation: a process for each.
CHECKS = {path.stem.removeprefix("check_"): [path] for path in sorted(FOLDER.glob("interpreted/check_*.py"))}
for name in SHARED:
    CHECKS[name].append(FOLDER / f"test_{name}.py")

pytestmark = [pytest.mark.requires("triton"), pytest.mark.slow, pytest.mark.timeout(620)]


@pytest.mark.parametrize("operation", CHECKS)
def test_interpreted(operation: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, CHECKS[operation])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary.group(1)) >= 1
    assert "skipped" not in done.stdout.splitlines()[-1]
