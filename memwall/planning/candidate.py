"""A candidate of the search that was replayed, and the plan file's record of it."""

import hashlib

import msgspec
from msgspec import Struct

from memwall.planning.action import Action
from memwall.planning.explain import disk_wear
from memwall.planning.forecast import Forecast, Lever, PeakBytes
from memwall.planning.location import Location
from memwall.planning.menu import recorded_min_bytes
from memwall.planning.planfile import Plan
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.link_time import LinkTime
from memwall.predict.process import Process
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.trace.workload_facts import workload_facts


class Candidate(Struct, frozen=True, kw_only=True):
    """Holds actions, and the bytes and seconds that a replay of the step under them took."""

    actions: tuple[Action, ...]
    process_bytes: int
    live_bytes: int
    extra_seconds: float
    compute_seconds: float
    """Seconds of the step under them, as if nothing moved."""
    moved_bytes: int
    """Saved tensors, in one optimizer step."""
    location: Location
    """Says where the optimizer's state and the parameters are."""
    num_parts: int
    """Micro-batches that the recorded one is split into."""
    lower_bound_seconds: float
    levers: tuple[Lever, ...]
    binding: tuple[str, ...]


def plan_of(
    found: Candidate,
    trace: Trace,
    steady: Step,
    plain: Step,
    process: Process,
    *,
    budget_bytes: int,
    fits: bool,
    smallest_budget_bytes: int,
) -> Plan:
    """Returns the plan file's record of a candidate.

    Args:
        steady: the steady step that the candidate treats. plain: that step without fused kernels, if it has any.
        fits: whether the margin fits as well. A run's first step is recorded under the safest plan; where that has
            passed the budget the run does not fit.
        smallest_budget_bytes: for which any plan exists.
    """
    steady_seconds = step_seconds(steady)
    held_bytes = found.moved_bytes // found.num_parts + found.location.held_bytes
    peak = PeakBytes(
        allocated_bytes=found.live_bytes,
        reserved_bytes=process.reserved_bytes(found.process_bytes),
        process_bytes=found.process_bytes,
        host_bytes=held_bytes if process.next_tier == "host" else None,
        disk_bytes=held_bytes if process.next_tier == "disk" else found.location.lowest_bytes or None,
    )
    moved_bytes = found.moved_bytes + found.location.written_bytes
    link = _link_time(found, trace, process, steady) if moved_bytes else None
    margin_bytes = process.margin_bytes(found.process_bytes)
    if fits and process.gives_back:  # above the budget its allocator does not go
        margin_bytes = min(margin_bytes, budget_bytes - found.process_bytes)
    phases = {"steady_step": peak}
    built_bytes = found.location.built_bytes
    if built_bytes:
        phases["build"] = PeakBytes(allocated_bytes=built_bytes - process.base_bytes, process_bytes=built_bytes)
    first = trace.steps[0]
    if trace.is_parked and first.process_peak_bytes:
        # It ran under the safest plan and has been measured already.
        parked = StepModel(first, trace.names, ()).parked(recorded_min_bytes(trace.device))
        phases["first_step"] = PeakBytes(
            # State that went to disk as it was made was never all there; the process bounds what was.
            allocated_bytes=min(live_peak_bytes(parked, trace.device), first.process_peak_bytes - trace.base_bytes),
            process_bytes=first.process_peak_bytes,
        )
        fits &= first.process_peak_bytes <= budget_bytes
    forecast = Forecast(
        device=trace.device,
        source=trace.source,
        fits=fits,
        budget_bytes=budget_bytes,
        margin_bytes=margin_bytes,
        peak=msgspec.structs.replace(peak, process_bytes=max(phase.process_bytes for phase in phases.values())),
        phases=phases,
        measured_phases=tuple(name for name in phases if name == "first_step"),
        peak_phase=max(sorted(phases), key=lambda name: phases[name].process_bytes),
        step_seconds=steady_seconds + found.extra_seconds,
        not_modelled=process.not_modelled(),
        actions=found.actions,
        levers=found.levers,
        binding=(*found.binding, *disk_wear(_on_disk(link, found, trace), steady_seconds + found.extra_seconds)),
        smallest_feasible_budget_bytes=smallest_budget_bytes,
        plain_peak=PeakBytes(
            allocated_bytes=live_peak_bytes(plain, trace.device),
            process_bytes=process.free(plain).process_bytes,
        ),
        plain_step_seconds=step_seconds(plain),
        moved_bytes_per_step=moved_bytes,
        lower_bound_seconds=steady_seconds + found.lower_bound_seconds,
        link=link,
        workload=workload_facts(trace),
        allocator=process.allocator_advice,
    )
    return Plan(
        model_fingerprint=trace.model_fingerprint,
        trace_hash=hashlib.sha256(msgspec.msgpack.encode(trace)).hexdigest(),
        micro_batch=trace.micro_batch,
        num_micro_batches=trace.num_micro_batches,
        forecast=forecast,
    )


def _on_disk(link: LinkTime | None, found: Candidate, trace: Trace) -> LinkTime | None:
    """Returns what of the bytes that a candidate moves is written to a disk: of a device's, those below its host."""
    if link is None or not found.location.lowest_bytes:
        return link
    disk = trace.machine.tiers[-1]
    return msgspec.structs.replace(
        link, tier="disk", written_bytes=found.location.lowest_bytes, tier_total_bytes=disk.total_bytes
    )


def _link_time(found: Candidate, trace: Trace, process: Process, steady: Step) -> LinkTime | None:
    """Returns the bytes that the candidate moves, where the speed of the link is known.

    What a step takes longer than moving all of it is no waiting for the link, but copies and faults on the way.
    """
    tier = trace.machine.next_tier
    if tier is None:
        return None
    link = LinkTime(
        tier=process.next_tier,
        written_bytes=found.moved_bytes + found.location.written_bytes,
        read_bytes=found.moved_bytes + found.location.read_bytes,
        batched_bytes=found.moved_bytes,
        write_bytes_per_second=tier.write_bytes_per_second,
        read_bytes_per_second=tier.read_bytes_per_second,
        compute_seconds=found.compute_seconds,
        fixed_seconds=sum(op.seconds for op in steady.ops if op.phase == "optimizer"),
        tier_total_bytes=tier.total_bytes,
    )
    at_least_seconds = step_seconds(steady) + found.extra_seconds - link.moving_seconds
    return msgspec.structs.replace(link, compute_seconds=max(link.compute_seconds, at_least_seconds))
