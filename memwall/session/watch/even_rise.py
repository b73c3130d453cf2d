"""Tells when a figure that is looked at every step or every few rises evenly, which nothing healthy does for long.

Its smallest values in four stretches of steps must rise by about as much from each to the next: a heap that warms up
rises less and less, and samples of different length rise and fall.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence

__all__ = ["EvenRise", "is_used_up_soon", "rise_per_step"]

STRETCHES = (4, 20, 80)
"""Steps in each of the four stretches: what grows fast is found in 16 steps, what grows slowly later."""
_NUM_STRETCHES = 4
_EVEN = 0.5
"""The least rise from one stretch to the next, as a share of the largest."""
_SOON_STEPS = 300
"""Steps within which a rise does harm if it goes on, for it to be told from the shortest stretches."""


def rise_per_step(values: Sequence[float], stretch: int, least: float) -> float | None:
    """Returns how much values rise with each step, where they do so evenly; None where they don't.

    Args:
        values: one for each step, the last one last.
        stretch: steps in each of the four parts whose smallest values are compared.
        least: what they must have risen by in all.
    """
    last = values[-_NUM_STRETCHES * stretch :]
    if len(last) < _NUM_STRETCHES * stretch or min(last[-stretch:]) - min(last[:stretch]) < least:
        return None  # as in nearly every step, and quickly found
    lows = [min(last[i : i + stretch]) for i in range(0, len(last), stretch)]
    rises = [after - before for before, after in itertools.pairwise(lows)]
    rise = (lows[-1] - lows[0]) / (len(rises) * stretch)
    # Values may go up and down within a stretch, beside the rise itself, by half of what they have risen by.
    swing = max(max(last[i : i + stretch]) - low for i, low in zip(range(0, len(last), stretch), lows, strict=True))
    if lows[-1] - lows[0] < max(least, 2 * (swing - rise * stretch)) or min(rises) < _EVEN * max(rises):
        return None
    return rise


def is_used_up_soon(room: float, rise: float) -> bool:
    """Tells whether what rises so much with each step reaches, within 300 of them, what it has room for."""
    return room <= _SOON_STEPS * rise


class EvenRise:
    """Keeps what a figure was in the last 320 steps.

    Args:
        least: what four stretches must have risen by; less is what moves without growth.
        every: steps from one look at the figure to the next; divides each stretch.
    """

    def __init__(self, least: float, *, every: int = 1) -> None:
        self._least_rise, self._every = least, every
        self._stretches = [steps // every for steps in STRETCHES]
        self._values: deque[float] = deque(maxlen=_NUM_STRETCHES * self._stretches[-1])
        self._lowest = math.inf
        """The least of the values that are kept."""
        self._has_first = True
        self.may_rise = False
        """Whether the last value is so much above another one that it may be growth."""

    def add(self, value: float) -> None:
        """Adds what the figure is at a look."""
        self._values.append(value)
        if self._has_first and len(self._values) > _NUM_STRETCHES * self._stretches[0]:
            # What the recorded step had left was often less, and would have each of the next 300 looked at closely.
            self._values.popleft()
            self._lowest, self._has_first = min(self._values), False
        self._lowest = min(self._lowest, value)
        self.may_rise = value - self._lowest >= self._least_rise

    def per_step(self, room: float = 0.0) -> float | None:
        """Returns how much the figure rises with each step, where it does so evenly; None where it does not.

        Args:
            room: how far it may still rise, of a figure of which nothing else tells why it does. Caches that fill
                rise as evenly for a while: only what would use the room up soon is told from the shortest stretches.
        """
        if not self.may_rise:
            return None  # as in nearly every step, and quickly found
        values = list(self._values)
        self._lowest = min(values)
        rises = (rise_per_step(values, stretch, self._least_rise) for stretch in self._stretches)
        soon, *later = (None if rise is None else rise / self._every for rise in rises)
        if soon is not None and is_used_up_soon(room, soon):
            return soon
        return next((rise for rise in later if rise is not None), None)

    def forget(self) -> None:
        """Begins anew."""
        self._values.clear()
        self._lowest, self.may_rise = math.inf, False
