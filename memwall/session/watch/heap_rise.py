"""Tells growth of what a process has in use from that of a heap that warms up, which looks the same from outside.

Batches of different lengths leave free pieces between those in use, so that a process rises evenly for dozens of steps
and leaks nothing; and what leaks goes into such pieces first. The C library counts what is in use, in 0.05 ms, or in a
few ms where the heap is in many pieces: it is asked step by step while the process rises, for as long as that is cheap.
"""

import ctypes
import time
from functools import cache
from typing import Any

from memwall.session.watch.even_rise import EvenRise

__all__ = ["HeapRise", "heap_bytes"]

_NUM_FIRST = 16
"""Steps of a run in which it is asked in any case: what grows from the beginning is to be found by then."""
_NUM_IN_A_ROW = 24
"""Steps in which it is asked one after the other once that has begun: enough to find a rise, and to ask again."""
_MOST_SHARE = 0.001
"""Part of the run's time that may have been spent on it for such a row to begin; three times that for it to go on."""
_SIZES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Sizes(ctypes.Structure):
    """Holds what mallinfo2(3) returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in _SIZES]


@cache
def _mallinfo() -> Any:
    """Returns glibc's function, from 2.33 on; None elsewhere."""
    found = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Sizes
    return found


def heap_bytes() -> int | None:
    """Returns the bytes that are in use in the C library's heap, and mapped by it; None where it does not tell."""
    mallinfo = _mallinfo()
    if mallinfo is None:
        return None
    sizes = mallinfo()
    return int(sizes.uordblks + sizes.hblkhd)


class HeapRise:
    """Looks at a run step by step, while it rises.

    Args:
        least: bytes that four stretches must have risen by.
    """

    def __init__(self, least: float) -> None:
        self._bytes = EvenRise(least)
        self._num_steps = self._num_in_a_row = 0
        self._spent, self._began = 0.0, time.perf_counter()

    def begin_step(self, *, is_rising: bool) -> None:
        """Looks at it, if that is due.

        Args:
            is_rising: whether the process holds more than it has.
        """
        self._num_steps += 1
        begin = time.perf_counter()
        is_due = is_rising or self._num_steps <= _NUM_FIRST
        share = _MOST_SHARE * (3 if self._num_in_a_row % _NUM_IN_A_ROW else 1)
        in_use = heap_bytes() if is_due and self._spent <= share * (begin - self._began) else None
        if in_use is None:
            self.forget()
            return
        self._bytes.add(float(in_use))
        self._num_in_a_row += 1
        self._spent += time.perf_counter() - begin

    def per_step(self, room: float = 0.0) -> float | None:
        """Returns how many bytes more are in use with each step, see `EvenRise.per_step`."""
        return self._bytes.per_step(room)

    def forget(self) -> None:
        """Begins anew."""
        if self._num_in_a_row:
            self._num_in_a_row = 0
            self._bytes.forget()
