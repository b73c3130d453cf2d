"""Keeps the plans of stages of a loop that freezes and unfreezes parameters in turns, so that few steps are recorded.

Which parameters take gradients decides what a step saves, so that a plan is of one such stage. A stage that lasts is
recorded, or comes back to its own plan. Of stages that follow each other within a few steps, as in loops that freeze a
GAN's networks in turns, a few are recorded, each once; from then on every step runs under the plan of the one that
needs the most memory.
"""

from memwall.session.live_plan import Revision

Stage = tuple[bool, ...]
"""Says of each parameter whether it takes gradients."""

_MOST_STAGES = 4
_SHORT_STEPS = 8
"""A stage that lasts fewer steps is one of several that follow each other in turns."""


class Stages:
    """Says of each step in which stage it is to be planned.

    Attributes:
        planned: the stage that the present plan is of.
    """

    def __init__(self) -> None:
        self.planned: Stage = ()
        self._known: dict[Stage, Revision] = {}
        self._num_steps = 0
        """Steps of the planned stage since the last one of another."""
        self._has_run = False
        """Whether the plan ran in a step of its own stage, in which its actions show their effects."""
        self._other: Stage | None = None
        """The stage that the loop is in, under another one's plan."""
        self._num_other = 0
        """Its steps so far, in a row."""

    def begin(self, stage: Stage) -> None:
        """Says that a step of this stage is being recorded."""
        self.planned, self._num_steps, self._has_run = stage, 0, False

    def goes_on(self) -> None:
        """Says that a step of the planned stage begins."""
        self._num_steps, self._has_run, self._num_other = self._num_steps + 1, True, 0

    def change(self, stage: Stage, present: Revision) -> Revision | None:
        """Returns the plan for a step of another stage, which may be the present one; None if it is to be recorded.

        Args:
            present: what is in effect.
        """
        if self._num_steps >= _SHORT_STEPS:
            self._known.clear()
        # A plan for more than can be had, as turned out since, is of no use any more.
        self._known = {one: plan for one, plan in self._known.items() if plan.budget_bytes <= present.budget_bytes}
        self._known[self.planned], self._num_steps = present, 0
        self._other, self._num_other = stage, self._num_other + 1 if stage == self._other else 1
        is_known, lasts = stage in self._known, self._num_other >= _SHORT_STEPS
        if not is_known and (lasts or len(self._known) < _MOST_STAGES):
            if lasts:
                self._known.clear()
            return None
        largest = max(self._known, key=lambda one: _plain_bytes(self._known[one]))
        if is_known and (lasts or self.planned != largest or not self._has_run):
            self.planned, self._has_run = stage, True
        elif self.planned != largest:
            self.planned, self._has_run = largest, False
        return self._known[self.planned]


def _plain_bytes(revision: Revision) -> int:
    plain = revision.plan.forecast.plain_peak
    return 0 if plain is None else plain.process_bytes
