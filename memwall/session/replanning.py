"""A session's plans: the first one, which knows what planning itself costs, and those after a step used too much."""

import logging

import msgspec
from torch import nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.memory.exhaustion import Exhaustion
from memwall.errors import InfeasibleError, PlanError
from memwall.machine.limits import cgroup_limit, memory_limit_bytes
from memwall.machine.meter import process_bytes, process_peak_bytes, reset_process_peak
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.predict.process import ProcessModel
from memwall.trace.modules import fingerprint
from memwall.trace.records import Trace
from memwall.units import format_bytes

__all__ = [
    "MAX_REPLANS",
    "budget_after",
    "check_plan_is_for",
    "excess_bytes",
    "planned",
    "planned_after",
    "planned_again",
]

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
        InfeasibleError: nothing fits; a run under the smallest budget that it names has room for planning as well.
    """
    _warn_of_limit(trace, settings)
    before_bytes, is_metered = process_bytes(), trace.device == "cpu" and reset_process_peak()
    try:
        plan = make_plan(trace, settings)
    except InfeasibleError:
        plan = None
    peak_bytes = process_peak_bytes() if is_metered else 0
    allocator.trim()
    grown_bytes = process_bytes() - before_bytes if trace.device == "cpu" else 0
    if plan is None:
        first = settings.first_step
        if first is not None:
            first = msgspec.structs.replace(first, needed_bytes=max(first.needed_bytes, peak_bytes))
            settings = msgspec.structs.replace(settings, first_step=first)
        trace = _charged(trace, max(0, grown_bytes))
        plan = make_plan(trace, settings)
    elif grown_bytes > plan.forecast.margin_bytes * _GROWTH_SHARE:
        trace = _charged(trace, grown_bytes)
        plan = make_plan(trace, settings)
    if plan.forecast.passed_phases:
        first_bytes = plan.forecast.phases["first_step"].process_bytes
        _log.warning(
            "the first step, which runs before there is a plan, took %s of a budget of %s; give at least that",
            format_bytes(first_bytes, rounding="up"),
            format_bytes(settings.budget_bytes, rounding="down"),
        )
    elif not plan.forecast.fits:
        _log.warning(
            "the plan fits only inside its margin: a step may exceed the budget by the forecast's error; "
            "give a larger budget where that must not happen"
        )
    return trace, plan


def excess_bytes(plan: Plan, peak_bytes: int) -> int:
    """How far a step's peak lies above what the plan foresaw, once it lies above the margin and near the budget."""
    excess = peak_bytes - _foreseen_bytes(plan)
    margin_bytes, budget_bytes = plan.forecast.margin_bytes, plan.forecast.budget_bytes
    is_near = budget_bytes is not None and peak_bytes + margin_bytes > budget_bytes
    return excess if excess > margin_bytes and is_near else 0


def planned_again(
    trace: Trace, settings: Settings, excess: int, *, is_explained: bool = False
) -> tuple[Trace, Plan] | None:
    """Charges what was measured beyond the forecast to the process, and plans with that; None if nothing fits then.

    Args:
        is_explained: whether the settings say something new that the excess came of; nothing is charged then.
    """
    trace = trace if is_explained else _charged(trace, excess)
    try:
        plan = make_plan(trace, settings)
    except InfeasibleError as error:
        _log.warning(
            "a step used %s more than foreseen, and no plan makes up for it, so the run goes on with this one: %s",
            format_bytes(excess),
            error,
        )
        return None
    _log.warning(
        "a step used %s more than foreseen; a new plan makes up for it, and nothing needs to be done",
        format_bytes(excess),
    )
    return trace, plan


def budget_after(plan: Plan, found: Exhaustion) -> int:
    """The budget of a plan that would not have failed like that; 0 where there is none.

    What the process held, it can have. And if what is foreseen is too little, as it was for this plan, then a plan that
    foresees less by what was asked for needs that much less.
    """
    budget_bytes = min(found.held_bytes, _foreseen_bytes(plan) - found.asked_bytes) + plan.forecast.margin_bytes
    return budget_bytes if budget_bytes >= (plan.forecast.smallest_feasible_budget_bytes or 1) else 0


def planned_after(
    trace: Trace, settings: Settings, plan: Plan, found: Exhaustion
) -> tuple[Trace, Settings, Plan] | None:
    """The plan after one under which memory ran out; None if none needs less.

    What was needed beyond the forecast is charged to the process. What the process held is all that it can have: where
    that is below the budget, the budget was not there.
    """
    trace = _charged(trace, max(0, found.held_bytes + found.asked_bytes - _foreseen_bytes(plan)))
    reachable_bytes = ProcessModel(trace).budget_for(found.held_bytes)
    settings = msgspec.structs.replace(settings, budget_bytes=min(settings.budget_bytes, reachable_bytes))
    try:
        made = make_plan(trace, settings)
    except InfeasibleError as error:
        _log.warning("no plan fits the %s that could be had: %s", format_bytes(settings.budget_bytes), error)
        return None
    return None if made.actions == plan.actions else (trace, settings, made)


def _foreseen_bytes(plan: Plan) -> int:
    return plan.forecast.phases.get("steady_step", plan.forecast.peak).process_bytes


def _warn_of_limit(trace: Trace, settings: Settings) -> None:
    """A plan may use all of a budget that the kernel does not grant."""
    limit_bytes = memory_limit_bytes()
    if trace.device == "cpu" and settings.budget_bytes > limit_bytes:
        limit = cgroup_limit()
        _log.warning(
            "the budget of %s is more than the %s that this process may have (%s): a step that needs more is ended by "
            "the kernel; give a budget below that",
            format_bytes(settings.budget_bytes),
            format_bytes(limit_bytes),
            limit.path if limit is not None and limit.limit_bytes == limit_bytes else "physical memory",
        )


def _charged(trace: Trace, num_bytes: int) -> Trace:
    return msgspec.structs.replace(trace, base_bytes=trace.base_bytes + num_bytes)
