"""The phases of a run under a plan for a device: building, first and steady steps, evaluating, saving and resuming."""

from collections.abc import Callable, Mapping

import msgspec

from memwall.planning.forecast import PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.planning.technique import technique_of
from memwall.predict.cuda_allocator.allocator_settings import parse_settings
from memwall.predict.device import DeviceModel, as_first
from memwall.predict.phases import PhasePeak, Phases, evaluation_bytes, returned_bytes
from memwall.trace.records import Step, Trace, route_of
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

# Budgets that are tried in search of one that holds, each so much larger at least; the last half in growing steps.
_MOST_ROUNDS, _NEXT_BUDGET = 12, 1.02
SMALLER_EVALUATION = "a smaller batch in evaluation: --eval-batch N"


def evaluation_with_metrics(evaluation: Step) -> str:
    """Says what the forecast of an evaluation leaves out."""
    return (
        "evaluation with metrics: the Trainer keeps what each batch returns "
        f"({format_bytes(returned_bytes(evaluation))}) on the device until the last, and twice while it adds one, "
        "unless eval_accumulation_steps is set"
    )


def with_device_phases(plan: Plan, trace: Trace, process: DeviceModel) -> Plan:
    """Returns the plan with every phase simulated, as `memwall estimate` has them; its peak stays that of the steps.

    Args:
        plan: made from `trace`, for that device.
    """
    found = _simulated(plan, trace, process)
    if found is None:  # out of memory on a device without end: an allocation larger than any address
        return plan
    plan = _with_phases(plan, trace, found, process)
    resume_bytes = plan.forecast.phases["resume"].process_bytes
    budget_bytes = plan.forecast.budget_bytes
    if not _moved_state_bytes(plan) or budget_bytes is None or resume_bytes <= budget_bytes:
        return plan
    reason = (
        "a state dict that is loaded has all of the optimizer's state on the device for a while: "
        f"{format_bytes(resume_bytes)} to resume, beyond the budget"
    )
    forecast = msgspec.structs.replace(plan.forecast, binding=(*plan.forecast.binding, reason))
    return msgspec.structs.replace(plan, forecast=forecast)


def with_evaluation(plan: Plan, trace: Trace, process: DeviceModel, evaluation: Trace) -> Plan:
    """Returns the plan with an evaluation between its steps as one more phase, which its peak and its verdict count.

    Where the allocator would hold more than the budget and its margin leave, but gets along by giving back what it
    caches, that is the forecast: it costs time once in an evaluation, not in every step. Nothing that a plan does makes
    an evaluation smaller.

    Args:
        plan: made from `trace`, for that device, with the phases of its steps.
        evaluation: recorded as the plan runs the model, and translated; its second step, where it has one, is the
            training step that follows.
    """
    evaluation = _under_plan(evaluation, plan)
    before, found = plan.forecast, _simulated(plan, trace, process, evaluation)
    if found is None or before.budget_bytes is None:
        return plan
    evaluated = evaluation.steps[0]
    wanted_bytes, room_bytes = found["eval"].reserved_bytes, process.room_bytes(before.budget_bytes)
    binding = before.binding
    if wanted_bytes > max(room_bytes, process.reserved_bytes(before.peak.process_bytes)):
        for capacity_bytes in (room_bytes, max(0, before.budget_bytes - process.base_bytes)):
            pressed = _simulated(plan, trace, process, evaluation, capacity_bytes=capacity_bytes)
            if pressed is not None:
                found = pressed
                binding += (
                    "the allocator has to give back cached memory to evaluate within the budget: it would reserve "
                    f"{format_bytes(wanted_bytes)}",
                )
                break
    process_bytes = max(before.peak.process_bytes, process.base_bytes + found["eval"].reserved_bytes)
    margin_bytes = process.margin_bytes(process_bytes)
    fits = bool(before.fits) and process_bytes + margin_bytes <= before.budget_bytes
    smallest_bytes = before.smallest_feasible_budget_bytes
    if smallest_bytes is not None:
        least_bytes = evaluation_bytes(evaluated, step_under_plan(trace, plan), process.profile)
        if not fits:  # the steps of one that fits may take all that was given
            least_bytes = _least_bytes(plan, trace, process, evaluation, between=(least_bytes, wanted_bytes))
        smallest_bytes = max(smallest_bytes, process.budget_for(process.base_bytes + least_bytes))
    plan = _with_phases(plan, trace, found, process)
    peak = plan.forecast.peak
    forecast = msgspec.structs.replace(
        plan.forecast,
        fits=fits,
        margin_bytes=margin_bytes,
        peak=msgspec.structs.replace(
            peak, reserved_bytes=process.reserved_bytes(process_bytes), process_bytes=process_bytes
        ),
        binding=binding,
        not_modelled=(
            *process.not_modelled_in_steps(),
            evaluation_with_metrics(evaluated),
            process.not_modelled_around(is_evaluated=True),
        ),
        relaxations=(SMALLER_EVALUATION, *before.relaxations) if before.fits and not fits else before.relaxations,
        smallest_feasible_budget_bytes=smallest_bytes,
    )
    return msgspec.structs.replace(plan, forecast=forecast)


def with_smallest_that_holds(plan: Plan, planned: Callable[[int], Plan]) -> Plan:
    """Returns the plan with the smallest budget that it tells raised to one under which the run fits; None if unfound.

    What is told follows from this plan, and a larger budget has another one, whose steps leave other pieces cached.

    Args:
        plan: one that does not fit.
        planned: makes the plan for so many bytes, with its evaluation.
    """
    told_bytes, least_bytes = plan.forecast.smallest_feasible_budget_bytes, plan.forecast.budget_bytes
    if told_bytes is None or least_bytes is None:
        return plan
    growth = _NEXT_BUDGET
    for number in range(_MOST_ROUNDS):
        told_bytes = max(told_bytes, least_bytes + 1)
        found = planned(told_bytes).forecast
        if found.fits:
            break
        if number >= _MOST_ROUNDS // 2:
            growth *= growth
        least_bytes = int(told_bytes * growth)
        told_bytes = found.smallest_feasible_budget_bytes or least_bytes
    else:
        told_bytes = None  # what was not planned is not told
    forecast = msgspec.structs.replace(plan.forecast, smallest_feasible_budget_bytes=told_bytes)
    return msgspec.structs.replace(plan, forecast=forecast)


def _under_plan(evaluation: Trace, plan: Plan) -> Trace:
    """Returns an evaluation whose parameters are where the plan has them."""
    evaluated, *following = evaluation.steps
    for action in plan.actions:
        evaluated = technique_of(action).evaluation(evaluation, evaluated, action)
    return msgspec.structs.replace(evaluation, steps=(evaluated, *following))


def _least_bytes(plan: Plan, trace: Trace, process: DeviceModel, evaluation: Trace, *, between: tuple[int, int]) -> int:
    """Returns the least that the allocator can do with in steps and evaluation, to one part in a hundred."""
    too_few_bytes, enough_bytes = between
    while enough_bytes - too_few_bytes > enough_bytes // 100:
        capacity_bytes = (enough_bytes + too_few_bytes) // 2
        if _simulated(plan, trace, process, evaluation, capacity_bytes=capacity_bytes) is None:
            too_few_bytes = capacity_bytes
        else:
            enough_bytes = capacity_bytes
    return enough_bytes


def _simulated(
    plan: Plan,
    trace: Trace,
    process: DeviceModel,
    evaluation: Trace | None = None,
    *,
    capacity_bytes: int | None = None,
) -> dict[str, PhasePeak] | None:
    """Returns peaks of the phases under the plan and its allocator settings; None where memory is out."""
    step = step_under_plan(trace, plan)
    setting = "".join(technique_of(action).required_cuda_setting(action) for action in plan.actions)
    settings = parse_settings(setting, process.profile)
    evaluated, after = None, None
    if evaluation is not None:
        evaluated, *following = evaluation.steps
        if following:
            after = step_under_plan(
                msgspec.structs.replace(trace, names=evaluation.names, steps=tuple(following)), plan
            )
    resumed = steady_step(trace) if _moved_state_bytes(plan) else None
    phases = Phases((as_first(step), step), evaluated, after_evaluation=after, resumed=resumed)
    return phases.peaks(process.profile, settings=settings, capacity_bytes=capacity_bytes)


def _with_phases(plan: Plan, trace: Trace, found: Mapping[str, PhasePeak], process: DeviceModel) -> Plan:
    away_bytes = _away_bytes(plan, trace)
    phases = {
        name: PeakBytes(
            allocated_bytes=peak.allocated_bytes,
            reserved_bytes=peak.reserved_bytes,
            process_bytes=process.base_bytes + peak.reserved_bytes,
            host_bytes=peak.host_bytes + away_bytes.get(name, 0),
            disk_bytes=_disk_bytes(plan, name, peak),
        )
        for name, peak in found.items()
    }
    peak = msgspec.structs.replace(
        plan.forecast.peak,
        allocated_bytes=max(phase.allocated_bytes for phase in phases.values()),
        host_bytes=max(phase.host_bytes or 0 for phase in phases.values()),
    )
    forecast = msgspec.structs.replace(
        plan.forecast,
        route=route_of(trace),
        peak=peak,
        phases=phases,
        measured_phases=(),
        peak_phase=max(phases, key=lambda name: phases[name].process_bytes),
    )
    return msgspec.structs.replace(plan, forecast=forecast)


def _disk_bytes(plan: Plan, name: str, peak: PhasePeak) -> int | None:
    """Returns the bytes on disk in a phase: those of a checkpoint, and state that is there from the first step on."""
    lowest_bytes = 0 if name == "build" else _lowest_bytes(plan)
    if peak.disk_bytes is None:
        return lowest_bytes or None
    return peak.disk_bytes + _state_bytes(plan) + 2 * lowest_bytes


def _away_bytes(plan: Plan, trace: Trace) -> dict[str, int]:
    """Returns the bytes that a plan adds to host memory, by phase.

    Saved tensors: of a batch that is split, those of one part. And the optimizer's state, where that is there between
    steps: a state dict is a copy of it, and so is what is read to be loaded. What a step on the CPU brings down passes
    through memory that stays, and so does state that is on disk.
    """
    num_parts = max(1, plan.batch_parts[1] // max(1, plan.num_micro_batches))
    state_bytes = _state_bytes(plan)
    steady, staged_bytes, passing_bytes = steady_step(trace), 0, state_bytes
    for action in plan.actions:
        staged_bytes, passing_bytes = technique_of(action).staged_bytes(steady, action) or (staged_bytes, passing_bytes)
    standing_bytes = state_bytes + sum(technique_of(action).host_parameter_bytes(action) for action in plan.actions)
    in_step = staged_bytes + (plan.forecast.moved_bytes_per_step - passing_bytes) // num_parts + standing_bytes
    # What is read to be loaded is in the peak of a resumption already.
    return {
        "first_step": in_step,
        "steady_step": in_step,
        "eval": staged_bytes + standing_bytes,
        "save": staged_bytes + standing_bytes + state_bytes + _lowest_bytes(plan),
        "resume": state_bytes,
    }


def _state_bytes(plan: Plan) -> int:
    """Returns the bytes of the optimizer's state that are in host memory between steps."""
    return sum(technique_of(action).host_state_bytes(action) for action in plan.actions)


def _moved_state_bytes(plan: Plan) -> int:
    return _state_bytes(plan) + _lowest_bytes(plan)


def _lowest_bytes(plan: Plan) -> int:
    """Returns the bytes of the optimizer's state that are on a disk below the host's memory between steps."""
    return plan.forecast.peak.disk_bytes or 0
