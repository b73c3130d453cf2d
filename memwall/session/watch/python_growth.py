"""Names the lines that keep what Python allocates for them: objects, strings of bytes, arrays of numpy's.

Python traces its allocations meanwhile, which slows a step down by some percent, and imports by ten times: only a few
steps are traced, of a run whose memory grows and whose tensors do not account for it, and that for a limited time. What
a library takes past Python has no lines.
"""

import os
import threading
import tracemalloc
import weakref
from functools import cache

from memwall.patches import note_permanent
from memwall.trace.source_lines import user_line

__all__ = ["TRACED_STEPS", "PythonGrowth"]

TRACED_STEPS = 3
"""Steps that are traced; what lives at the end of the first is compared with what lives at the end of the last."""
_PART = 0.2
"""Part of the least that all lines must account for, below which one of them is not worth telling."""
_NUM_FRAMES = 8
"""Frames of each allocation, among which a line of the user's is looked for."""

_tracing: "weakref.WeakSet[PythonGrowth]" = weakref.WeakSet()


class PythonGrowth:
    """Traces from construction until `stop`; nothing where the script does so itself.

    Args:
        limit_seconds: time after which it ends by itself, and there are no lines.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._is_tracing = not tracemalloc.is_tracing()
        self._first: dict[str, int] | None = None
        self._limit = threading.Timer(limit_seconds, self.stop)
        self._limit.daemon = True
        if self._is_tracing:
            _stop_in_children()
            _tracing.add(self)
            tracemalloc.start(_NUM_FRAMES)
            self._limit.start()

    def begin_step(self) -> None:
        """Looks at what the first step has left; to be called when a step begins."""
        if self._is_tracing and self._first is None:
            self._first = _held()

    def lines(self, least_bytes: float) -> list[tuple[str, int]]:
        """Ends it, and returns the lines that have kept more with each step, with the bytes of one, the most first.

        Args:
            least_bytes: what they must account for in each step; none is returned where they do not.
        """
        if not self._is_tracing or self._first is None:
            return []
        held, before = _held(), self._first
        self.stop()
        kept = {line: (num_bytes - before.get(line, 0)) // (TRACED_STEPS - 1) for line, num_bytes in held.items()}
        grown = [(line, num_bytes) for line, num_bytes in kept.items() if num_bytes > _PART * least_bytes]
        is_enough = sum(num_bytes for _, num_bytes in grown) >= least_bytes
        return sorted(grown, key=lambda each: -each[1]) if is_enough else []

    def stop(self) -> None:
        """Ends it. Safe to call twice."""
        if self._is_tracing:
            self._is_tracing = False
            tracemalloc.stop()
            self._limit.cancel()


def _held() -> dict[str, int]:
    """Returns the bytes of all that was allocated since the trace began and is still there, by line of the user's.

    It is empty where the trace has ended.
    """
    held: dict[str, int] = {}
    try:
        snapshot = tracemalloc.take_snapshot()
    except RuntimeError:
        return held
    for place in snapshot.statistics("traceback"):
        line = user_line((frame.filename, frame.lineno) for frame in reversed(place.traceback))
        if line:
            held[line] = held.get(line, 0) + place.size
    return held


@cache
def _stop_in_children() -> None:
    """Has forked processes, as a data loader's workers, run as fast as without."""

    def stop() -> None:
        for each in list(_tracing):
            each.stop()

    os.register_at_fork(after_in_child=stop)
    reason = "Python has no way to remove it"
    note_permanent("hook", "os.register_at_fork", why="names lines whose memory grows", reason=reason)
