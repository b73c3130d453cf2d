"""Ends the process at an instant, whatever it does: a timer of the C library's, which waits for no lock of Python's.

Python takes a second to take itself and torch apart, and beside the work of other processes ten: no thread of its own
runs then.
"""

import ctypes
import sys

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


class Deadline:
    """Has the process end by `_exit`, with a status, in so many seconds; where there is no such timer it does nothing.

    A forked child and the program that takes this one's place have no part in it.
    """

    def __init__(self, seconds: float, status: int) -> None:
        self._timer: ctypes.c_void_p | None = None
        if sys.platform != "linux":
            return
        library, timer = ctypes.CDLL(None), ctypes.c_void_p()
        leave = ctypes.cast(library._exit, ctypes.c_void_p).value
        event = _Event(value=status, notify=_SIGEV_THREAD, function=leave)
        if library.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)) == 0:
            self._timer = timer
            whole, rest = divmod(seconds, 1.0)
            times = _Times(first=(int(whole), int(rest * 1e9)))
            library.timer_settime(timer, 0, ctypes.byref(times), None)

    def lift(self) -> None:
        """Has the process go on. Safe to call twice."""
        timer, self._timer = self._timer, None
        if timer is not None:
            ctypes.CDLL(None).timer_delete(timer)
