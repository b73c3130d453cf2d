"""Changes to a plan that has room for an evaluation that begins, where the present one has none."""

import logging
import math

from memwall.errors import InfeasibleError
from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import evaluation_under_actions
from memwall.session.live_plan import LivePlan
from memwall.session.loop.evaluation_batch import with_evaluation
from memwall.session.step_borders import StepBorders
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

_log = logging.getLogger(__name__)


class EvaluationRoom:
    """Judges each plan by the evaluations under it, once for so many samples.

    Args:
        live: the plan.
        borders: knows the model and what it is called with.
    """

    def __init__(self, live: LivePlan, borders: StepBorders) -> None:
        self._live, self._borders = live, borders
        self._judged: Plan | None = None
        self._judged_batch = 0
        """The samples of the largest evaluation for which that plan was found to have room."""
        self._without_room: Plan | None = None
        """The plan instead of which no other has room for the evaluations of this run."""

    def make(self) -> None:
        """Changes to a plan that has room for the evaluation that begins, if the present one has none and one has."""
        live = self._live
        if live.trace is None:
            live.evaluated = max(live.evaluated, self._borders.input_shape, key=math.prod)
        trace, plan, first = live.trace, live.plan, live.settings.first_step
        if trace is None or trace.device != "cpu" or plan is None or first is None or live.ranks is not None:
            return
        known = with_evaluation(first, trace, self._borders.attached_model, self._borders.input_shape)
        is_judged = plan is self._judged and known.evaluation_batch <= self._judged_batch
        if is_judged or plan is self._without_room:
            return
        self._judged, self._judged_batch = plan, known.evaluation_batch
        foreseen_bytes = evaluation_under_actions(trace, steady_step(trace), plan.actions, known)
        live.expect(known)
        if foreseen_bytes + plan.forecast.margin_bytes <= live.settings.budget_bytes:
            return
        try:
            revision = live.revised(charged_bytes=0, for_evaluation=True)
        except InfeasibleError:  # whoever watches the budget says when it is passed
            live.expect(first)
            self._without_room = plan
            return
        if revision.plan.actions != plan.actions:
            _log.warning(
                "an evaluation of %d samples at once is foreseen to hold %s under the plan; another one makes room "
                "for it, and nothing needs to be done",
                known.evaluation_batch,
                format_bytes(foreseen_bytes, rounding="up"),
            )
            live.change_to(revision)
