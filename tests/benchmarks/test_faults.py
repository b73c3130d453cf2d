"""A share of what benchmarks/faults.py does to training runs: nothing comes of it but the same, or one clear error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "faults.py"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "options",
    [("signals", "--share", "1/60"), ("clocks", "threads"), ("soak", "--minutes", "0.15")],
    ids=lambda options: options[0],
)
def test_harm_ends_well(options: tuple[str, ...]) -> None:
    command = [sys.executable, str(PROGRAM), *options, "--scratch"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
