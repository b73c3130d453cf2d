"""Records the same step in other forms, as under autocast or with fused kernels, for plans that may use them."""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from memwall.planning.action import Action
from memwall.trace.records import Trace

Record = Callable[[frozenset[str]], tuple[Trace, Action | None]]


class Recordings(NamedTuple):
    """Says in which forms a step can be recorded from here; a form is named by its technique's word of --allow."""

    offered: frozenset[str]
    """Forms that the step was not recorded in yet."""
    record: Record
    """Records the step in all of these forms at once; returns the trace, and the action that shows in it, if any."""
    taken: frozenset[str] = frozenset()
    """Forms that the step was recorded in."""

    def take(self, form: str) -> "tuple[Trace, Action | None, Recordings]":
        """Records the step in one form more; returns what `record` does, and what there is to record from then on."""
        taken = self.taken | {form}
        return *self.record(taken), self._replace(offered=self.offered - {form}, taken=taken)

    def changed(self, change: Callable[[Trace], Trace]) -> "Recordings":
        """Returns these with every trace that will be recorded changed."""

        def record(forms: frozenset[str]) -> tuple[Trace, Action | None]:
            trace, action = self.record(forms)
            return change(trace), action

        return self._replace(record=record)

    def kept(self) -> "Recordings":
        """Returns these with each form recorded once: a recording takes seconds, and gives the same trace each time."""
        return self._replace(record=cache(self.record))
