"""Notices that a run needs more memory with each step, and names the lines whose tensors nothing frees.

What the process holds between steps is looked at when a step begins. Its smallest values in four stretches of steps
must rise evenly: a heap that warms up rises less and less, and samples of different length rise and fall. Then one
step's tensors are noted, and asked for three steps later: those that still live are what grows.
"""

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Sequence

from memwall.session.watch.births import Births
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_STRETCHES = (5, 20, 80)
"""Steps in each of the four stretches: what grows fast is found in 20 steps, what grows slowly later."""
_NUM_STRETCHES = 4
_FIRST_STEPS = _NUM_STRETCHES * _STRETCHES[0] + 1
"""Steps after which what came before the first of them does not count any more."""
_EVEN = 0.5
"""The least rise from one stretch to the next, as a share of the largest."""
_LEAST_BYTES = 8 << 20
"""The least that four stretches must have risen by; a heap without growth moves by less."""
_STEPS_LATER = 3
"""Steps after which tensors of a step are asked for: what a loop holds over to the next step is gone by then."""
_LEAST_SHARE = 0.5
"""Part of the growth that the tensors found must account for, to be named as its cause."""
_MOST_LINES = 3
_HANDLES_EVERY = 5
_LEAST_HANDLES = 40


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


class GrowthWatch:
    """Looks at a run once a step, and says once what grows.

    Args:
        budget_bytes: returns the budget of the run; 0 for none.
        is_compiled: returns whether the model is compiled; a step's tensors are not noted then.
    """

    def __init__(self, *, budget_bytes: Callable[[], int], is_compiled: Callable[[], bool]) -> None:
        self._budget_bytes, self._is_compiled = budget_bytes, is_compiled
        self._bytes: deque[float] = deque(maxlen=_NUM_STRETCHES * _STRETCHES[-1])
        self._least_bytes = math.inf
        """The least that was held when any of the steps began whose bytes are kept."""
        self._has_risen = False
        """Whether this step began with so much more than that that it may be growth."""
        self._handles: list[float] = []
        self._open_before: set[str] = set()
        self._num_open = -1
        self._num_steps = 0
        self._births: Births | None = None
        self._noted_at = 0
        self._watching: tuple[int, ...] | None = None
        self._bytes_per_step = 0.0
        self._said: set[str] = set()
        self._is_outside_tensors = False
        """Whether a step's tensors were asked for, and did not account for the growth."""

    def begin_step(self, now_bytes: int) -> None:
        """Looks at what the steps so far have left; to be called when a step begins.

        Args:
            now_bytes: what was held when the last one had ended.
        """
        self._num_steps += 1
        self._look_at_handles()
        self.close()
        if "memory" in self._said:
            return
        if self._births is not None:
            if self._num_steps == self._noted_at + _STEPS_LATER:
                self._ask(now_bytes)
            return
        self._bytes.append(float(now_bytes))
        if self._num_steps == len(self._bytes) == _FIRST_STEPS:
            # What the recorded step had left was often less, and would have each of the next 300 looked at closely.
            self._bytes.popleft()
            self._least_bytes = min(self._bytes)
        self._least_bytes = min(self._least_bytes, now_bytes)
        self._has_risen = now_bytes - self._least_bytes >= _LEAST_BYTES
        if not self._has_risen:
            return  # as in nearly every step, and quickly found
        values = list(self._bytes)
        self._least_bytes = min(values)
        # What no step's tensors account for moves for more reasons: it has to rise for longer.
        for stretch in _STRETCHES[1:] if self._is_outside_tensors else _STRETCHES:
            rise = rise_per_step(values, stretch, _LEAST_BYTES)
            if rise is None:
                continue
            self._bytes_per_step = rise
            if self._is_outside_tensors:
                self._say(
                    now_bytes,
                    f"no tensor of step {self._noted_at} of the plan is held: it is Python objects, a library's "
                    "memory, or tensors that are kept at some steps only, as those that are logged",
                )
            elif self._is_compiled() or Births.watching() != self._watching:
                self._say(now_bytes, "which lines do that is not known, as the model is compiled or its steps watched")
            else:
                self._births, self._noted_at = Births(), self._num_steps
            return

    def end_step(self) -> None:
        """Looks at who watches operations between steps, too, where notes may begin; to be called when a step ends.

        Modes have to end in the reverse of the order they began: one that a loop has around its forward alone would
        end the notes instead of itself.
        """
        self._watching = Births.watching() if self._has_risen else None

    def close(self) -> None:
        """Ends what is noted of a step."""
        if self._births is not None:
            self._births.stop()

    def _ask(self, now_bytes: int) -> None:
        assert self._births is not None
        births, self._births = self._births, None
        self._bytes.clear()
        living = births.living_bytes()
        if sum(living.values()) < _LEAST_SHARE * self._bytes_per_step:
            self._is_outside_tensors = True
            return
        lines = [f"{line or 'no line of yours'} ({format_bytes(held)})" for line, held in living.items()]
        more = f" and {len(lines) - _MOST_LINES} lines more" if len(lines) > _MOST_LINES else ""
        self._say(
            now_bytes,
            f"what step {self._noted_at} of the plan made here still lives {_STEPS_LATER} steps later: "
            f"{', '.join(lines[:_MOST_LINES])}{more}. A list or a dictionary that keeps losses or outputs keeps what "
            "made them: keep loss.item() or output.detach()",
        )

    def _say(self, now_bytes: int, cause: str) -> None:
        self._said.add("memory")
        found = f"memory grows by {format_bytes(int(self._bytes_per_step))} with each step"
        if self._budget_bytes() > now_bytes:
            left = int((self._budget_bytes() - now_bytes) / self._bytes_per_step)
            found += f", and what is held between steps reaches the budget in about {left} of them"
        _log.warning("%s; %s", found, cause)

    def _look_at_handles(self) -> None:
        if self._num_steps % _HANDLES_EVERY or "handles" in self._said:
            return
        before, self._num_open = self._num_open, _num_open_files()
        self._handles = [*self._handles[-_NUM_STRETCHES + 1 :], float(self._num_open)]
        if self._num_open <= before:
            return  # as in nearly every step, and quickly found
        handles = _open_files()
        new = [name for name in handles if name not in self._open_before]
        self._open_before = set(handles)
        rise = rise_per_step(self._handles, 1, _LEAST_HANDLES)
        if rise is None:
            return
        self._said.add("handles")
        _log.warning(
            "open files grow by %.1f with each step: %d are open, among the latest is %s",
            rise / _HANDLES_EVERY,
            len(handles),
            new[-1] if new else "none with a name of its own",
        )


def _num_open_files() -> int:
    """Returns how many files this process has open; 0 where the system does not tell."""
    try:
        # Linux says it as the folder's size from 6.2 on; to list it takes a hundred times as long.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1  # that of the listing itself
    except OSError:
        return 0


def _open_files() -> list[str]:
    """Returns what this process has open, by number of the handle; nothing where the system does not tell."""
    found = []
    try:
        numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return []
    for number in numbers:
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # that of the listing itself
            continue
    return found
