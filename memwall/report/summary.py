"""Shows forecasts, plans, and what a run came to, in a few lines each: what commands print; -v shows all there is."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from memwall.observe.run_report import RunReport
from memwall.planning.explain import actions_text, writes_text
from memwall.planning.forecast import Forecast
from memwall.planning.planfile import Plan
from memwall.report.estimate_grids import route_row, workload_row
from memwall.report.grid import ratio_text
from memwall.report.run_grids import time_findings
from memwall.report.text import (
    facts,
    forecast_verdict,
    plan_verdict,
    printable,
    ranks_text,
    relaxations_of,
    run_verdict,
    shown_verdict,
)
from memwall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memwall.checkpoint.writer import CommitTimes
    from memwall.planning.estimate import Estimate

_NUM_NAMED = 3


def estimate_summary(estimate: "Estimate", searched: str = "") -> Group:
    """Says whether a step fits on a device that is not here, and what it takes there: `memwall estimate`.

    Args:
        searched: says which size was searched for and found; "" for none.
    """
    peak, held = estimate.peak, estimate.in_peak
    named = held.by_category[:_NUM_NAMED]
    lines = [
        ("device", estimate.device),
        *workload_row(estimate.workload),
        (
            "peak",
            f"{_up(peak.process_bytes)}, first in {estimate.peak_phase.replace('_', ' ')}: "
            f"{_up(peak.reserved_bytes or 0)} reserved for {_up(peak.allocated_bytes)} of tensors, "
            f"{_up(estimate.context_bytes[0])} of context",
        ),
        ("made of", ", ".join(f"{share.name.replace('_', ' ')} {format_bytes(share.num_bytes)}" for share in named)),
        ("besides", f"{_besides(estimate)}; {_up(peak.host_bytes or 0)} of host memory"),
        *_allocator(estimate),
        *route_row(estimate, estimate.product),
    ]
    if estimate.step_seconds is not None:
        lines.append(("step", f"at least {format_seconds(estimate.step_seconds)} at data-sheet peaks"))
    return printable(
        (
            shown_verdict(forecast_verdict(estimate)),
            *((Text(searched),) if searched else ()),
            facts(lines),
            *relaxations_of(estimate),
            _small_print(estimate),
        )
    )


def forecast_summary(plan: Plan, file: Path | None, page_file: Path | None = None) -> Group:
    """Says what a plan for a run to come does, and what it leaves unsaid: `memwall plan`.

    Args:
        file: the plan was written to; None for none.
        page_file: that of the page; None for none.
    """
    forecast = plan.forecast
    page = f"\nAs a page: memwall report {file} -o {file.with_suffix('.html')}" if file else ""
    if page_file is not None:
        page = f"\nThe step with and without the plan: {page_file}"
    return printable(
        (
            shown_verdict(plan_verdict(plan)),
            facts((*workload_row(forecast.workload), *_plan_lines(plan), *_allocator(forecast), *route_row(forecast))),
            *relaxations_of(forecast),
            _small_print(forecast, page),
        )
    )


def _up(num_bytes: int) -> str:
    return format_bytes(num_bytes, rounding="up")


def _besides(estimate: "Estimate") -> str:
    """Returns what the process takes in the phases around the training steps."""
    names = {"build": "building", "eval": "evaluating", "resume": "resuming"}
    found = [
        f"{verb} {_up(estimate.phases[name].process_bytes)}" for name, verb in names.items() if name in estimate.phases
    ]
    return ", ".join(found)


def _allocator(forecast: Forecast) -> list[tuple[str, str]]:
    advice = forecast.allocator
    if advice is None or not advice.saved_bytes:
        return []
    saved = f"{format_bytes(advice.reserved_bytes)} reserved instead of {format_bytes(advice.default_reserved_bytes)}"
    return [("allocator", f"with {advice.settings} {saved}; see -v")]


def _small_print(forecast: Forecast, page: str = "") -> Text:
    number = len(forecast.not_modelled)
    return Text(
        f"Predicted, not measured; -v has all tables, and {number} things that are not modelled.{page}", style="dim"
    )


def plan_summary(plan: Plan) -> Group:
    """Says whether a plan fits, what it does, and what that costs."""
    return printable((shown_verdict(plan_verdict(plan)), facts(_plan_lines(plan))))


def _plan_lines(plan: Plan) -> list[tuple[str, str]]:
    forecast = plan.forecast
    peak = _up(forecast.peak.process_bytes)
    if forecast.plain_peak is not None and plan.actions:
        peak += f"; without the plan {_up(forecast.plain_peak.process_bytes)}"
    lines = [("does", actions_text(plan.actions)), ("peak", peak)]
    if forecast.step_seconds is not None:
        step = format_seconds(forecast.step_seconds)
        if forecast.plain_step_seconds and plan.actions:
            step += f", {ratio_text(forecast.step_seconds, forecast.plain_step_seconds)} the plain one"
        lines.append(("step", step))
    writes = writes_text(plan)
    if writes:
        lines.append(("disk", writes))
    smallest_bytes = forecast.smallest_feasible_budget_bytes
    if smallest_bytes is not None and (plan.actions or not forecast.fits):
        lines.append(("smallest", f"{_up(smallest_bytes)} would do"))
    return lines


def run_summary(report: RunReport, *, status: int = 0) -> Group:
    """Says whether a run kept to its budget and its forecast, and names what else a person should know.

    Args:
        status: of the script.
    """
    measured, forecast = report.measured, report.forecast
    peaks = [f"{_up(report.steady_peak_bytes)} in a step"]
    peaks[0] += f", foreseen {_up(forecast.steady_process_bytes)}"
    if measured.first_step_peak_bytes:
        peaks.append(f"{_up(measured.first_step_peak_bytes)} in the first")
    if measured.proof_peak_bytes > report.steady_peak_bytes:
        peaks.append(f"{_up(measured.proof_peak_bytes)} in one that proved the plan")
    if report.outside_steps_bytes is not None:
        peaks.append(f"{_up(report.outside_steps_bytes)} outside them")
    steps = f"{measured.steps}"
    if measured.step_seconds_median is not None:
        steps += f" of {format_seconds(measured.step_seconds_median)}"
        if forecast.step_seconds is not None:
            steps += f", foreseen {format_seconds(forecast.step_seconds)}"
    lines = [("peak", "; ".join(peaks)), ("steps", steps)]
    if report.ranks is not None:
        lines.append(("ranks", ranks_text(report.ranks)))
    return printable((shown_verdict(run_verdict(report, status=status)), facts(lines), *_remarks(report)))


def recovery_line(directory: str, *, step: int, num_bytes: int, seconds: float) -> str:
    """Returns the line of a run that goes on."""
    return (
        f"{directory}: step {step} was read and verified, {format_bytes(num_bytes)} in {format_seconds(seconds)}; the "
        "run continues from there"
    )


def commits_line(directory: str, times: "CommitTimes") -> str:
    """Returns the line of a process that has committed something; writing and recording go on beside the next step."""
    number = times.num_commits
    written, recorded = times.transfer_seconds / number, times.record_seconds / number
    return (
        f"{directory}: {number} {'commit' if number == 1 else 'commits'} of "
        f"{format_bytes(times.written_bytes / number)}, each {format_seconds(written)} to write and "
        f"{format_seconds(recorded)} to record and sync"
    )


def _remarks(report: RunReport) -> Iterable[Text]:
    measured = report.measured
    if measured.num_replans:
        number, what = measured.num_replans, "plan was" if measured.num_replans == 1 else "plans were"
        yield Text(f"{number} {what} made again, as more was needed than foreseen.")
    if measured.oom_recoveries:
        number, what = measured.oom_recoveries, "step was" if measured.oom_recoveries == 1 else "steps were"
        yield Text(f"{number} {what} done again after memory ran out.", style="yellow")
    for line in time_findings(report):
        yield Text(line, style="yellow")
    for path, reason in sorted(measured.not_recomputed.items()):
        yield Text(f"Not recomputed: '{path}': {reason}.", style="yellow")
