"""Chooses for compiled graphs, while they are compiled, how much of their forwards they save."""

import logging
from collections.abc import Callable

from memwall.torch_internals.partitioner import SavedBytes, cut_by
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_RATIOS = (1.0, 0.75, 0.5, 0.25, 0.1)
LEAST_RATIO = _RATIOS[-1]
"""Less has the whole forward of a graph run again before its backward, all of which is in memory then."""


class GraphCuts:
    """Cuts each graph at the largest ratio at which all of them together have room; at the least where none has.

    What a backward needs besides what is saved is not known before it runs: `recut` cuts deeper, once a step has shown
    that it must.

    Args:
        room_bytes: returns what graphs may save.
        before: how graphs were cut that are compiled already, and are not compiled again.

    Attributes:
        ratio: the smallest ratio of a graph so far; the script's own until there was one.
        left_out_bytes: what graphs would save beside what they do.
    """

    def __init__(self, room_bytes: Callable[[], int], before: "GraphCuts | None" = None) -> None:
        self._room_bytes = room_bytes
        self.ratio: float = 1.0 if before is None else before.ratio
        self.left_out_bytes: int = 0 if before is None else before.left_out_bytes
        self._most, self._saved_bytes = 1.0, 0
        self._undo = cut_by(self._choose)

    @property
    def is_possible(self) -> bool:
        """Returns whether this torch's partitioner can be told."""
        return self._undo is not None

    def recut(self) -> bool:
        """Has graphs that are compiled from now on cut deeper than any was; returns whether that is possible."""
        deeper = [ratio for ratio in _RATIOS if ratio < self.ratio]
        if not deeper:
            return False
        self._most, self._saved_bytes, self.left_out_bytes = deeper[0], 0, 0
        return True

    def undo(self) -> None:
        """Leaves the compiler to itself. Safe to call twice."""
        self._room_bytes = lambda: 0  # it knows the model, which this does not keep alive
        if self._undo is not None:
            self._undo()

    def _choose(self, saved_bytes: SavedBytes, own: float) -> float:
        most = min(own, self._most)
        whole_bytes, room_bytes = saved_bytes(own), self._room_bytes()
        for ratio in (most, *(ratio for ratio in _RATIOS if ratio < most)):
            num_bytes = whole_bytes if ratio == own else saved_bytes(ratio)
            if num_bytes <= room_bytes - self._saved_bytes:
                break
        _log.info(
            "a compiled graph saves %s of %s, of %s that there is for all",
            *map(format_bytes, (num_bytes, whole_bytes)),
            format_bytes(max(0, room_bytes)),
        )
        self._saved_bytes += num_bytes
        self.left_out_bytes += whole_bytes - num_bytes
        self.ratio = min(self.ratio, ratio)
        return ratio
