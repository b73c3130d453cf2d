"""Stream code in random orders of work: the same bits in each, and other ones where waits are missing.

`make races` runs many more schedules, and brings faults back one by one (race_finder.py).
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stream_programs import PROGRAMS

HERE = Path(__file__).parent


def digests(program: str, num_schedules: int) -> set[str]:
    """Returns the different digests of a program in so many schedules."""
    device = ctypes.CDLL(os.environ["PHANTOM_LIBRARY"])
    found = set()
    for seed in range(num_schedules):
        device.phantom_seed(ctypes.c_uint64(seed))
        found.add(PROGRAMS[program]())
    return found


@pytest.mark.phantom(order="random")
@pytest.mark.parametrize("program", PROGRAMS)
def test_no_order_of_work_that_events_allow_changes_a_bit(program: str) -> None:
    assert len(digests(program, 6)) == 1


@pytest.mark.phantom(order="random", drop_waits=True)
@pytest.mark.parametrize("program", PROGRAMS)
def test_without_waits_between_streams_bits_change(program: str) -> None:
    """The control: a bench that sees no race where there is no order sees nothing."""
    assert len(digests(program, 12)) > 1


@pytest.mark.slow
@pytest.mark.phantom
def test_a_fault_that_is_brought_back_is_found() -> None:
    command = [sys.executable, HERE / "race_finder.py", "--schedules", "3", "a spent buffer is freed"]
    environment = os.environ | {"PHANTOM_ORDER": "random", "PHANTOM_NUMBERS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=110, check=False)
    assert "1 of 1 faults are found" in done.stdout, done.stdout + done.stderr
