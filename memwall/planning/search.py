"""The plan for a budget: as the step was recorded, with fused kernels, or in lower precision if need be.

For each recording `planning.one_recording` finds the cheapest candidate whose forecast fits.
"""

from collections.abc import Sequence

import msgspec

from memwall.errors import InfeasibleError, TraceError, UsageError
from memwall.machine.hardware import Hardware
from memwall.planning.modes import allowed_words, check_one_process, has_mode
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.planfile import Plan
from memwall.planning.recordings import Recordings
from memwall.planning.settings import Settings
from memwall.planning.technique import techniques
from memwall.trace.records import Trace
from memwall.units import parse_size

# What a plan without writes may cost more than one with them, as a share of what that adds to the plain step; and as
# a share of the step, below which nobody notices.
_WORTH_WRITING = 1.25
_AS_LONG = 1.01


def plan(
    trace: Trace,
    *,
    budget: str | int,
    disk: str | None = None,
    tier_capacity_bytes: int | None = None,
    no_disk: bool = False,
    allow: Sequence[str] = (),
    global_batch: int | None = None,
    hardware: Hardware | None = None,
    recordings: Recordings | None = None,
) -> Plan:
    """Returns the cheapest plan under which the traced run fits `budget`.

    Where none leaves room for the forecast's error, one that fits without it: its `forecast.fits` is False.

    Args:
        budget: what the process may use on the trace's device: bytes or a size such as "10GiB".
        disk: directory of the next tier; by default the one measured when the trace was recorded.
        tier_capacity_bytes: the most to take of that tier; by default all that is free.
        no_disk: whether nothing may be written to a disk: writes wear it.
        allow: what may be done that is not bit-exact: words of --allow, or one of its modes, "exact",
            "balanced" or "smallest"; `memwall plan --allow help` lists all.
        global_batch: samples per optimizer step; must be what the trace ran. Given, the plan may split it into smaller
            micro-batches that accumulate; without it the micro-batch stays.
        hardware: the device that the trace was translated to (memwall.predict.cuda.translate), where it is not here.
        recordings: what records the same step in other forms, for when nothing else fits, or a plan costs time.

    Raises:
        InfeasibleError: nothing fits; says how much would, and what to allow.
        UsageError: the budget is no size, the global batch is not the trace's, or something is allowed that
            cannot be done.
        TraceError: no step was recorded.
    """
    if not trace.steps:
        raise TraceError("the trace has no step, and a plan needs one: record one whole training step")
    allow = allowed_words(allow)
    check_one_process(allow)
    for technique in techniques():
        reason = technique.why_not(trace, tuple(allow)) if technique.allow in allow else None
        if reason is not None and not has_mode(allow):
            raise UsageError(f"--allow {technique.allow}: {reason}")
    recorded = trace.micro_batch * trace.num_micro_batches
    if global_batch is not None and global_batch != recorded:
        raise UsageError(
            f"the trace ran {recorded} samples per optimizer step, asked for is a global batch of {global_batch}; "
            "record a trace with that batch"
        )
    if disk is not None and trace.device == "cpu" and trace.machine.disk != disk:
        raise UsageError(
            f"disk={disk!r}: the trace knows the speed of {trace.machine.disk or 'no disk'}; measure this one with "
            "`memwall plan TRACE --disk DIR`"
        )
    settings = Settings(
        budget_bytes=parse_size(budget),
        disk=disk,
        tier_capacity_bytes=tier_capacity_bytes,
        no_disk=no_disk,
        allow=tuple(allow),
        allow_accumulation=global_batch is not None,
        hardware=hardware,
        recordings=recordings,
    )
    return make_plan(trace, settings)


def make_plan(trace: Trace, settings: Settings) -> Plan:
    """Returns the cheapest plan; see `plan`.

    Raises:
        InfeasibleError: nothing fits.
    """
    search = RecordingSearch(trace, settings)
    found = found_by(search)
    if found is None:
        raise refused_by(search)
    return found


def found_by(search: RecordingSearch) -> Plan | None:
    """Returns the cheapest plan of a search; None where nothing fits, of which `refused_by` says more.

    Raises:
        InfeasibleError: nothing fits in another recording of the step either, which it is about.
    """
    trace, settings = search.trace, search.settings
    for has_margin in (True, False):
        # A full allocator takes time that no forecast counts: one is planned only where nothing else fits.
        for fills in (False, True) if has_margin and search.can_fill else (not has_margin,):
            found = _best_of(search, has_margin=has_margin, fills=fills)
            if found is not None:
                return _sparing_the_disk(found, trace, settings, has_margin=has_margin)
        for technique in techniques():
            recording = technique.recording_where_nothing_fits(trace, settings)
            if recording is not None:
                return make_plan(recording.trace, recording.settings)
    return None


def refused_by(search: RecordingSearch) -> InfeasibleError:
    """Returns what says by how much nothing fits, of the recording that needs the least."""
    return min((search, *search.others), key=RecordingSearch.smallest_bytes).infeasible()


def _sparing_the_disk(found: Plan, trace: Trace, settings: Settings, *, has_margin: bool) -> Plan:
    """Returns a plan that writes nothing to the disk where that costs little more: writes wear it, day after day."""
    forecast = found.forecast
    plain_seconds, seconds = forecast.plain_step_seconds, forecast.step_seconds
    writes = forecast.link is not None and forecast.link.tier == "disk"
    if not writes or settings.hardware is not None or plain_seconds is None or seconds is None:
        return found
    in_memory = RecordingSearch(trace, msgspec.structs.replace(settings, no_disk=True))
    other = _best_of(in_memory, has_margin=has_margin, fills=False)
    if other is None or other.forecast.step_seconds is None:
        return found
    most_seconds = max(plain_seconds + _WORTH_WRITING * (seconds - plain_seconds), _AS_LONG * seconds)
    if other.forecast.step_seconds > most_seconds:
        return found
    smallest_bytes = forecast.smallest_feasible_budget_bytes
    return msgspec.structs.replace(
        other, forecast=msgspec.structs.replace(other.forecast, smallest_feasible_budget_bytes=smallest_bytes)
    )


def _best_of(plain: RecordingSearch, *, has_margin: bool, fills: bool) -> Plan | None:
    """Returns the plan of the shortest step; another recording is looked at only where the plans of this cost time."""
    plain.has_margin, plain.fills = has_margin, fills
    found = plain.best()
    if found is not None and not any((action.cost_seconds or 0.0) > 0.0 for action in found.actions):
        return plain.as_plan(found)
    best = plain
    for search in plain.others:
        search.has_margin, search.fills = has_margin, fills
        other = search.best()
        if other is not None and (found is None or search.seconds_of(other) < best.seconds_of(found)):
            found, best = other, search
    return None if found is None else best.as_plan(found)
