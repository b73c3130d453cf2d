"""Reports what a session measured, beside what its plan foresaw."""

from statistics import median

from memwall.errors import TraceError
from memwall.observe.run_report import Measured, RunReport
from memwall.planning.forecast import PeakBytes
from memwall.session.session import Session
from memwall.trace.records import measured_tag


def run_report(session: Session, *, script: str = "") -> RunReport:
    """Returns the report of a session that has ended.

    Args:
        script: what trained in it, where a command ran that.

    Raises:
        TraceError: the session has no plan yet: fewer than one whole step ran.
    """
    plan, measured = session.plan, session.measured
    if plan is None:
        raise TraceError("the run ended before its first step was complete; there is nothing to compare")
    budget_bytes = session.budget_bytes
    steady_bytes = measured.steady_peak_bytes
    judged_bytes = max(measured.overall_peak_bytes, measured.peak_bytes)
    tier = "disk" if plan.forecast.device == "cpu" else "host"
    allocator = measured.allocator or measured.last_allocator
    planned_bytes = measured.bytes_to_tier - measured.first_step_bytes_to_tier
    return RunReport(
        script=script,
        plan_hash=plan.plan_hash,
        budget_bytes=budget_bytes,
        forecast=plan.forecast,
        measured=Measured(
            tag=measured_tag(plan.forecast.device),
            peak=PeakBytes(
                allocated_bytes=allocator.allocated_bytes if allocator else max(0, steady_bytes - measured.base_bytes),
                reserved_bytes=allocator.reserved_bytes if allocator else None,
                process_bytes=judged_bytes,
                disk_bytes=plan.forecast.moved_bytes_per_step if tier == "disk" else None,
            ),
            steady_peak_bytes=steady_bytes,
            proof_peak_bytes=measured.proof_peak_bytes,
            replaced_peak_bytes=measured.replaced_peak_bytes,
            first_step_peak_bytes=measured.first_step_peak_bytes,
            inactive_bytes=allocator.inactive_bytes if allocator else None,
            others_bytes=measured.meter.others_bytes() or 0,
            num_alloc_retries=allocator.num_retries if allocator else None,
            step_seconds_median=median(measured.step_seconds) if measured.step_seconds else None,
            steps=measured.num_steps,
            oom_recoveries=measured.oom_recoveries,
            bytes_moved={tier: measured.bytes_to_tier} if measured.bytes_to_tier else {},
            bytes_moved_per_step=planned_bytes // len(measured.step_seconds) if measured.step_seconds else None,
            plan_seconds=measured.plan_seconds,
            num_replans=measured.num_replans,
            not_recomputed={block: why for (tag, block), why in measured.lost.items() if tag == "recompute"},
            lost={" ".join(name): why for name, why in measured.lost.items() if name[0] != "recompute"},
            unproven=dict(measured.unproven),
            not_itemised_bytes=steady_bytes - plan.forecast.steady_process_bytes,
        ),
        within_budget=judged_bytes <= budget_bytes,
    )
