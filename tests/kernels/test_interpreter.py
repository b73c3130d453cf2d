"""The kernels themselves, on the CPU, in Triton's interpreter: in a process of their own, as importing chooses it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
# What the reference has to pass, and the kernels as well; what is for kernels alone.
CHECKS = [FOLDER / "test_glu.py", FOLDER / "test_norms.py", *sorted(FOLDER.glob("interpreted/check_*.py"))]

pytestmark = [pytest.mark.requires("triton"), pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.stem)
def test_interpreted(path: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    summary = re.search(r"(\d+) passed", done.stdout)
    assert summary is not None
    assert int(summary.group(1)) >= 1
    assert "skipped" not in done.stdout.splitlines()[-1]
