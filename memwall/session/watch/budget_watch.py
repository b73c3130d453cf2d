"""Says while a run goes on that it holds more than its budget: once for each part of the run, when it happens."""

import logging
import threading
import time
import weakref
from collections.abc import Callable

from memwall.session.measurements import Measurements
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 0.2
_PATIENCE_SECONDS = 5.0
"""Time that a step being recorded may hold more: when it ends in time, its plan says so with more to go by."""


def place_of(phase: str, state: str) -> tuple[str, bool]:
    """Returns what a session does, for messages, and whether a plan or a refusal may still come that says more."""
    if phase == "evaluation":
        return "an evaluation, which no plan makes smaller", False
    if phase == "saving":
        return "saving", False
    return {
        "waiting": ("what runs before a step that memwall can record", True),
        "recording": ("the first step, before there is a plan", True),
        "recorded": ("the first step, before there is a plan", True),
    }.get(state, ("a training step", False))


class BudgetWatch:
    """Looks at the highest bytes of the process from a thread of its own, and whenever `look` is called.

    Args:
        place: returns what runs now, as "an evaluation", and whether a plan may still come that says it better.
    """

    def __init__(self, measured: Measurements, place: Callable[[], tuple[str, bool]]) -> None:
        self._measured, self._place = measured, place
        self._budget_bytes = 0
        self._said: set[str] = set()
        self._since: float | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, budget_bytes: int) -> None:
        """Begins to look, until `close`. Of a CUDA device only calls of `look` do: its meter is not for all threads."""
        self._budget_bytes = budget_bytes
        if self._measured.meter.device != "cpu" or not budget_bytes or self._thread is not None:
            return
        run = (weakref.ref(self), self._ended)
        thread = threading.Thread(target=_look_now_and_then, args=run, name="memwall-budget", daemon=True)
        thread.start()
        self._thread = thread  # only now: whoever ends the run meanwhile joins none that has not begun

    def look(self, peak_bytes: int | None = None) -> None:
        """Says that the budget is passed, where it is and nobody has said so.

        Args:
            peak_bytes: what the process has held at most, where that was just measured.
        """
        if not self._budget_bytes or self._measured.meter.device != "cpu":
            return
        if peak_bytes is None:
            peak_bytes = self._measured.meter.peak_bytes()
            if peak_bytes > self._budget_bytes:  # only then is it worth the time to look at what is shown
                peak_bytes = self._measured.held_peak_bytes()
        if peak_bytes <= self._budget_bytes:
            return
        place, is_told_later = self._place()
        with self._lock:
            self._since = self._since or time.monotonic()
            if is_told_later and time.monotonic() - self._since < _PATIENCE_SECONDS:
                return
            if place in self._said:
                return
            self._said.add(place)
        _log.warning(
            "the budget of %s is passed in %s: the process has held %s, %s more",
            format_bytes(self._budget_bytes, rounding="down"),
            place,
            format_bytes(peak_bytes, rounding="up"),
            format_bytes(peak_bytes - self._budget_bytes, rounding="up"),
        )

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)
        self._thread = None


def _look_now_and_then(found: "weakref.ref[BudgetWatch]", ended: threading.Event) -> None:
    """Looks until the watch is closed, or gone with a session that nobody has closed."""
    while not ended.wait(_INTERVAL_SECONDS):
        watch = found()
        if watch is None:
            return
        watch.look()
        del watch
