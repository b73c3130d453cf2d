"""Operations of a step that are to run once more, and what becomes of the step's times where they are put in."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from memwall.trace.left_out.siblings import Stretch
from memwall.trace.records import ModuleCall, Step


class Span(NamedTuple):
    """Describes operations [start, end) of a run, of which copies come before operation `at`."""

    run: int
    at: int
    start: int
    end: int
    is_backward: bool
    base: int = 0
    """Where the copy of the first one is in the new step."""

    def again(self, time: int) -> int:
        """Returns the time in the copy that is one in here in the recorded step."""
        return self.base + time - self.start


class Spans:
    """Holds the forward and backward operations of runs; copies of the first follow them, those of the last go ahead.

    What ends before an operation, ends before what is put in ahead of it; what begins with it, begins after that.
    """

    def __init__(self, step: Step, runs: Sequence[Stretch]) -> None:
        self.all: list[Span] = []
        num_before = 0
        for span in sorted(_spans(step, runs), key=lambda span: (span.at, -span.start)):
            self.all.append(span._replace(base=span.at + num_before))
            num_before += span.end - span.start
        self._at = [span.at for span in self.all]
        self._added = [0, *accumulate(span.end - span.start for span in self.all)]
        self._of: dict[int, Span] = {op: span for span in self.all[::-1] for op in range(span.start, span.end)}

    def of(self, op: int) -> Span | None:
        """Returns the span that an operation is in; None where it is in none."""
        return self._of.get(op)

    def ended(self, time: int) -> int:
        """Returns the new time of what ends before an operation."""
        return time + self._added[bisect_left(self._at, time)]

    def begun(self, time: int) -> int:
        """Returns the new time of what begins with an operation, and the new number of the operation itself."""
        return time + self._added[bisect_right(self._at, time)]

    def forward_ended(self, time: int) -> int:
        """Returns the new time at which a call ends, or a phase begins, that may have a copied forward as its last."""
        return self.ended(time) + sum(s.end - s.start for s in self.all if s.at == time and not s.is_backward)

    def again(self, time: int, run: int) -> int:
        """Returns a time of a copy: that in the copied span, or else the one when it is in the recorded step."""
        for span in self.all:
            if span.run == run and span.start <= time <= span.end:
                return span.again(time)
        return self.ended(time)


def backward_of(run: Stretch) -> tuple[int, int]:
    """Returns the operations of a run's backward; both -1 where it has none."""
    calls: list[ModuleCall] = [call for call in (run.first, run.last) if call.backward_start >= 0]
    return min((call.backward_start for call in calls), default=-1), max((c.backward_end for c in calls), default=-1)


def _spans(step: Step, runs: Sequence[Stretch]) -> list[Span]:
    found = []
    for number, run in enumerate(runs):
        start, end = run.first.start, run.last.end
        backward_start, backward_end = backward_of(run)
        is_backward = start < len(step.ops) and step.ops[start].phase == "backward"
        if is_backward and backward_start >= 0:  # it is called again there, and its backward follows
            found.append(Span(number, start, start, backward_end, True))
            continue
        found.append(Span(number, end, start, end, is_backward))
        if backward_start >= 0:
            found.append(Span(number, backward_start, backward_start, backward_end, True))
    return found
