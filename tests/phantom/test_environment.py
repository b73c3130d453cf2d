"""The environment of the phantom device: its packages are those of the checkout that it was made from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.phantom(numbers=False)
def test_a_script_elsewhere_gets_memwall_of_this_checkout(tmp_path: Path) -> None:
    """GIVEN an environment below that has another checkout's packages WHEN a script runs THEN it is not met."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = (sys.executable, "-c", "import memwall; print(memwall.__file__)")
    found = subprocess.check_output(asked, cwd=tmp_path, env=without, text=True)
    assert Path(found.strip()).is_relative_to(CHECKOUT)
