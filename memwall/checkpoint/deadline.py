"""Ends the process at an instant, whatever it does: a timer of the C library's, which waits for no lock of Python's.

Python takes a second to take itself and torch apart, and beside the work of other processes ten: no thread of its own
runs then.
"""

import ctypes
import sys
from contextlib import suppress

_CLOCK_MONOTONIC, _SIGEV_THREAD = 1, 2


class _Event(ctypes.Structure):
    """Is a `struct sigevent` of glibc's and musl's, as far as a function in a thread of its own needs it."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 64),
    )


class _Times(ctypes.Structure):
    """Is a `struct itimerspec`: seconds and nanoseconds between calls, and until the first one."""

    _fields_ = (("interval", ctypes.c_long * 2), ("first", ctypes.c_long * 2))


def exit_in(seconds: float, status: int) -> None:
    """Has the process end by `_exit`, with a status, in so many seconds; where there is no such timer it does nothing.

    A forked child and the program that takes this one's place have no part in it.
    """
    library = _library_of_timers()
    if library is None:
        return
    timer = ctypes.c_void_p()
    leave = ctypes.cast(ctypes.CDLL(None)["_exit"], ctypes.c_void_p).value
    event = _Event(value=status, notify=_SIGEV_THREAD, function=leave)
    if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
        whole, rest = divmod(seconds, 1.0)
        times = _Times(first=(int(whole), int(rest * 1e9)))
        library.timer_settime(timer, 0, ctypes.byref(times), None)


def _library_of_timers() -> ctypes.CDLL | None:
    """Returns the C library, or the one beside it that has the timers in glibc before 2.34; None where neither does."""
    if sys.platform != "linux":
        return None
    for name in (None, "librt.so.1"):
        with suppress(OSError, AttributeError):  # no such library, no such function
            library = ctypes.CDLL(name)
            if library.timer_create and library.timer_settime:
                return library
    return None
