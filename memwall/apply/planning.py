"""A session's plans: the first one, which knows what planning itself costs, and those after a step used too much."""

import logging

import msgspec
from torch import nn

from memwall.apply.allocator import AllocatorHandler
from memwall.errors import InfeasibleError, PlanError
from memwall.plan.planfile import Plan
from memwall.plan.search import Settings, make_plan
from memwall.trace.meter import process_bytes
from memwall.trace.modules import fingerprint
from memwall.trace.records import Trace
from memwall.units import format_bytes

__all__ = ["MAX_REPLANS", "check_plan_is_for", "excess_bytes", "planned", "planned_again"]

_log = logging.getLogger(__name__)

MAX_REPLANS = 3
"""A run that needs more has something in it that no plan knows."""
# Part of the margin that planning may use up before the plan is made again with it known.
_GROWTH_SHARE = 0.1


def check_plan_is_for(plan: Plan, model: nn.Module) -> None:
    """Whether a plan that was given is for this model, where it is.

    Raises:
        PlanError: it was made for another model or device.
    """
    if plan.model_fingerprint != fingerprint([model]):
        raise PlanError(
            f"the plan was made for another model: it names {plan.model_fingerprint[:12]}, this "
            f"{type(model).__name__} is {fingerprint([model])[:12]}; make a plan for this model with "
            "`memwall plan`, or run with --budget"
        )
    device = next((p.device.type for p in model.parameters()), "cpu")
    if plan.forecast.device.partition(":")[0] != device:
        raise PlanError(
            f"the plan is for device {plan.forecast.device}, the model is on {device}; "
            f"make a plan from a trace recorded on {device}, or run with --budget"
        )


def planned(trace: Trace, settings: Settings, allocator: AllocatorHandler) -> tuple[Trace, Plan]:
    """A plan that knows what planning left in the process, the solver's code and the trace; and the trace that says so.

    Raises:
        InfeasibleError: nothing fits.
    """
    before_bytes = process_bytes()
    plan = make_plan(trace, settings)
    allocator.trim()
    grown_bytes = process_bytes() - before_bytes
    if grown_bytes > plan.forecast.margin_bytes * _GROWTH_SHARE:
        trace = _charged(trace, grown_bytes)
        plan = make_plan(trace, settings)
    if not plan.forecast.fits:
        _log.warning("the plan fits only inside its margin: a step may exceed the budget by the forecast's error")
    return trace, plan


def excess_bytes(plan: Plan, peak_bytes: int) -> int:
    """How far a step's peak lies above what the plan foresaw, once it lies above the margin and near the budget."""
    foreseen = plan.forecast.phases.get("steady_step", plan.forecast.peak)
    excess = peak_bytes - foreseen.process_bytes
    margin_bytes, budget_bytes = plan.forecast.margin_bytes, plan.forecast.budget_bytes
    is_near = budget_bytes is not None and peak_bytes + margin_bytes > budget_bytes
    return excess if excess > margin_bytes and is_near else 0


def planned_again(trace: Trace, settings: Settings, excess: int) -> tuple[Trace, Plan] | None:
    """Charges what was measured beyond the forecast to the process, and plans with that; None if nothing fits then."""
    trace = _charged(trace, excess)
    try:
        plan = make_plan(trace, settings)
    except InfeasibleError as error:
        _log.warning("a step used %s more than foreseen, and no plan makes up for it: %s", format_bytes(excess), error)
        return None
    _log.warning("a step used %s more than foreseen; a new plan makes up for it", format_bytes(excess))
    return trace, plan


def _charged(trace: Trace, num_bytes: int) -> Trace:
    return msgspec.structs.replace(trace, base_bytes=trace.base_bytes + num_bytes)
