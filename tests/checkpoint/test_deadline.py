"""A process ends at its deadline whatever it does, by whichever library has timers."""

import ctypes
from types import SimpleNamespace

import pytest
from warm_python import warm_python

from memwall.checkpoint import deadline

PROGRAMS = {
    "sleeps": "exit_in(0.2, 143); time.sleep(60)",
    "holds Python's lock": "exit_in(0.2, 143); ctypes.PyDLL(None).sleep(60)",
    "takes itself apart": "exit_in(0.2, 143); atexit.register(ctypes.PyDLL(None).sleep, 60)",
}


@pytest.mark.slow
@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS)
def test_the_status_is_that_of_the_deadline(source: str) -> None:
    head = "import atexit, ctypes, time; from memwall.checkpoint.deadline import exit_in; "
    program = warm_python().start("-c", head + source)
    assert program.wait(timeout_s=30) == 143, program.said


def test_timers_are_found_in_the_library_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a glibc before 2.34, whose C library has no timers THEN the library beside it has."""
    beside = SimpleNamespace(timer_create=print, timer_settime=print)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: beside if name == "librt.so.1" else SimpleNamespace())
    assert deadline._library_of_timers() is beside


def test_without_timers_there_is_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(name: str | None) -> SimpleNamespace:
        if name is not None:
            raise OSError(name)
        return SimpleNamespace()

    monkeypatch.setattr(ctypes, "CDLL", opened)
    assert deadline._library_of_timers() is None
    deadline.exit_in(0.0, 143)
