"""A session's first plan: one that was given, or one that knows what planning itself costs."""

import logging
import os
from collections.abc import Sequence
from contextlib import suppress

import msgspec
import torch
from torch import nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.errors import InfeasibleError, PlanError, UsageError
from memwall.machine.limits import cgroup_limit, device_total_bytes, memory_limit_bytes
from memwall.machine.meter import process_bytes, process_peak_bytes, reset_process_peak
from memwall.planning.modes import allowed_words, check_one_process, has_mode
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.planfile import Plan
from memwall.planning.search import found_by, make_plan, refused_by
from memwall.planning.settings import Settings
from memwall.planning.technique import techniques
from memwall.trace.modules import fingerprint
from memwall.trace.records import COMPILED_CODE, Trace
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

# Part of the margin that planning may use up before the plan is made again with it known.
_GROWTH_SHARE = 0.1
# What planning holds at least for the budget that a refusal tells to be rehearsed: below that the margin has room.
_NOTED_BYTES = 16 << 20


def asked(
    budget_bytes: int | None,
    plan: Plan | None,
    *,
    disk: str | None,
    no_disk: bool,
    allow: Sequence[str],
) -> Settings:
    """Returns what a session is asked for, checked as far as that goes before it knows the model.

    Raises:
        UsageError: neither or both of budget and plan; what is allowed is not known, or only a CUDA device has it.
        PlanError: the plan is for a device that is not here.
    """
    if (budget_bytes is None) == (plan is None):
        raise UsageError("give either a budget or a plan, not both and not neither")
    if plan is not None and plan.forecast.device.startswith("cuda") and not torch.cuda.is_available():
        raise PlanError(
            f"the plan is for device {plan.forecast.device}, and torch finds no CUDA device here; run it on a "
            "machine with one, or make a plan from a trace recorded on this machine with `memwall profile`"
        )
    allow = allowed_words(allow)
    check_one_process(allow)
    if not torch.cuda.is_available():
        check_device(allow, "cpu")
    if budget_bytes is None:
        budget_bytes = (plan.forecast.budget_bytes or 0) if plan is not None else 0
    path = None if disk is None else os.path.abspath(disk)  # a script may go to another folder
    return Settings(budget_bytes=budget_bytes, disk=path, no_disk=no_disk, allow=tuple(allow))


def check_device(allow: Sequence[str], device: str) -> None:
    """Checks that what is allowed by its own word can be done on a kind of device.

    Raises:
        UsageError: something cannot.
    """
    for technique in techniques():
        if technique.allow in allow and not has_mode(allow):
            technique.check_device(device)


def check_asked_of(model: nn.Module, plan: Plan | None, allow: Sequence[str], budget_bytes: int) -> None:
    """Checks that a session's model, and the device that it is on, is one for what the session is asked for.

    Raises:
        UsageError: what is allowed cannot be done there, or the budget is more than the device has.
        PlanError: the plan that was given is for another model, or for a device with more memory.
    """
    if plan is not None:
        check_plan_is_for(plan, model)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    check_device(allow, device.type)
    check_device_has(device, budget_bytes, plan)


def check_plan_is_for(plan: Plan, model: nn.Module) -> None:
    """Checks that a plan that was given is for this model, where it is.

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


def check_device_has(device: torch.device, budget_bytes: int, plan: Plan | None) -> None:
    """Checks that a CUDA device has what a budget, or a plan that was given, counts on. On a CPU a cgroup may grow.

    Raises:
        UsageError: the budget is larger than the device's memory.
        PlanError: the plan's peak is.
    """
    if device.type != "cuda":
        return
    total_bytes = device_total_bytes(str(device))
    has = f"the {format_bytes(total_bytes, rounding='down')} that {device} has"
    if plan is None and budget_bytes > total_bytes:
        raise UsageError(
            f"the budget of {format_bytes(budget_bytes)} is more than {has}; give at most that, or a percentage of it "
            "such as 95%"
        )
    if plan is not None and plan.forecast.peak.process_bytes > total_bytes:
        raise PlanError(
            f"the plan needs {format_bytes(plan.forecast.peak.process_bytes, rounding='up')}, more than {has}; make "
            "one for this device with `memwall plan`, or run with --budget"
        )


def planned(
    trace: Trace, settings: Settings, allocator: AllocatorHandler, *, is_first: bool = True, num_to_come: int = 0
) -> tuple[Trace, Plan]:
    """Returns a plan that knows what planning left in the process, solver and trace; and the trace that says so.

    Args:
        is_first: whether the run has had no plan before. One that has is not ended by a step that was recorded anew.
        num_to_come: models whose steps are to be recorded as well, each beside what the plannings before it have left.

    Raises:
        InfeasibleError: nothing fits, or the first step or planning did not, with which the next run begins again; one
            under the smallest budget that it names has room for both.
    """
    _warn_of_limit(trace, settings)
    first = settings.first_step
    is_passed = is_first and first is not None and first.needed_bytes > settings.budget_bytes
    if trace.device != "cpu" and is_passed:
        raise RecordingSearch(trace, settings).infeasible()
    before_bytes, is_metered = process_bytes(), trace.device == "cpu" and reset_process_peak()
    is_other = False
    """Whether what was refused is another recording of the step."""
    try:
        plan = found_by(RecordingSearch(trace, settings))
    except InfeasibleError:
        plan, is_other = None, True
    peak_bytes = process_peak_bytes() if is_metered else 0
    is_passed |= is_first and first is not None and peak_bytes > settings.budget_bytes  # by planning itself
    # One that is compiled as a whole saves less from its second step on: whether it has passed is judged at the end.
    is_refused = is_passed and COMPILED_CODE not in trace.names
    allocator.trim()
    grown_bytes = process_bytes() - before_bytes if trace.device == "cpu" else 0
    if plan is None or is_refused:
        if first is not None:
            last_bytes = first.needed_bytes + num_to_come * max(0, grown_bytes)
            first = msgspec.structs.replace(first, needed_bytes=max(last_bytes, peak_bytes))
            settings = msgspec.structs.replace(settings, first_step=first)
        trace = charged(trace, max(0, grown_bytes))
        search = RecordingSearch(trace, settings)
        if is_metered and peak_bytes - before_bytes > _NOTED_BYTES:
            search = _rehearsed(search)
        if is_refused:
            raise search.infeasible()
        if not is_other:
            raise refused_by(search)
        plan = make_plan(trace, search.settings)
    elif grown_bytes > plan.forecast.margin_bytes * _GROWTH_SHARE:
        trace = charged(trace, grown_bytes)
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


def _rehearsed(search: RecordingSearch) -> RecordingSearch:
    """Plans for the budget that is about to be told, as the run under it does: that may hold more than a refusal."""
    settings, first = search.settings, search.settings.first_step
    if first is None:
        return search
    told = msgspec.structs.replace(settings, budget_bytes=search.smallest_bytes())
    reset_process_peak()
    with suppress(InfeasibleError):
        found_by(RecordingSearch(search.trace, told))  # which knows nothing yet, as that run's: this takes memory
    first = msgspec.structs.replace(first, needed_bytes=max(first.needed_bytes, process_peak_bytes()))
    return search.under(msgspec.structs.replace(settings, first_step=first))


def _warn_of_limit(trace: Trace, settings: Settings) -> None:
    """Says that the kernel does not grant all of the budget, which a plan may use."""
    limit_bytes = memory_limit_bytes()
    if trace.device == "cpu" and settings.budget_bytes > limit_bytes:
        limit = cgroup_limit()
        _log.warning(
            "the budget of %s is more than the %s that this process may have (%s): a step that needs more is ended by "
            "the kernel; give a budget below that",
            format_bytes(settings.budget_bytes, rounding="down"),
            format_bytes(limit_bytes, rounding="down"),
            limit.path if limit is not None and limit.limit_bytes == limit_bytes else "physical memory",
        )


def charged(trace: Trace, num_bytes: int) -> Trace:
    """Returns the trace of a process that holds so many bytes more, whatever they are."""
    return msgspec.structs.replace(trace, base_bytes=trace.base_bytes + num_bytes)
