"""Knows of the plan in effect which bytes it foresees at its highest point, by what they are."""

from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.predict.curve import peak_of
from memwall.trace.records import Trace

__all__ = ["ForeseenCategories"]


class ForeseenCategories:
    """Looks at each plan once."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._bytes: dict[str, int] = {}

    def of(self, trace: Trace | None, plan: Plan | None) -> dict[str, int]:
        """Returns the bytes of tensors by category, the most first; nothing without a plan or a recorded step.

        Args:
            trace: of the step that the plan was made from.
        """
        if trace is None or plan is None:
            return {}
        if plan is not self._plan:
            peak = peak_of(trace, step_under_plan(trace, plan))
            self._plan, self._bytes = plan, {share.name: share.num_bytes for share in peak.by_category}
        return self._bytes
