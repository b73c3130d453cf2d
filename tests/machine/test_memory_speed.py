"""Memory is measured as fast as memory is."""

import mmap
import sys

import pytest

from memwall.machine import memory_speed
from memwall.machine.memory_speed import copy_seconds_per_byte, fault_seconds_per_byte, kernel_seconds


def test_a_copy_takes_a_plausible_time() -> None:
    assert 1e-12 < copy_seconds_per_byte() < 1e-8


@pytest.mark.parametrize("in_huge_pages", [False, True])
def test_the_cost_of_a_fault_is_measured_as_a_plausible_time(in_huge_pages: bool) -> None:
    # Zeroing alone runs below 100 GB/s; a page of 4 KiB takes less than 40 us to fault in even on a slow machine.
    assert 1e-12 < fault_seconds_per_byte(in_huge_pages=in_huge_pages) < 1e-8


def test_a_touch_that_something_else_held_up_does_not_hide_the_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a second touch slower than its first WHEN faults are measured THEN the other tries say what one takes."""
    times = iter([(3.0, 1.0), (2.0, 5.0), (4.0, 1.0)])
    monkeypatch.setattr(memory_speed, "_touch_seconds", lambda _: next(times))
    assert fault_seconds_per_byte() == 1.0 / memory_speed._PROBE_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells of a single thread")
def test_pages_that_become_resident_take_the_kernels_time() -> None:
    before = kernel_seconds()
    with mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        for place in range(0, len(region), mmap.PAGESIZE):
            region[place] = 1
    assert kernel_seconds() > before
