"""Shows a run's plan, its commits and what it came to, in a few lines each: `memwall run`; -v shows all there is."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from memwall.observe.run_report import RunReport
from memwall.planning.explain import actions_text, writes_text
from memwall.planning.planfile import Plan
from memwall.report.grid import ratio_text
from memwall.report.run_grids import time_findings
from memwall.report.text import facts, plan_verdict, printable, ranks_text, run_verdict, shown_verdict
from memwall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memwall.checkpoint.writer import CommitTimes


def plan_summary(plan: Plan) -> Group:
    """Says whether a plan fits, what it does, and what that costs."""
    forecast = plan.forecast
    peak = format_bytes(forecast.peak.process_bytes, rounding="up")
    if forecast.plain_peak is not None and plan.actions:
        peak += f"; without the plan {format_bytes(forecast.plain_peak.process_bytes, rounding='up')}"
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
    if smallest_bytes is not None and plan.actions:
        lines.append(("smallest", f"{format_bytes(smallest_bytes, rounding='up')} would do"))
    return printable((shown_verdict(plan_verdict(plan)), facts(lines)))


def run_summary(report: RunReport, *, status: int = 0) -> Group:
    """Says whether a run kept to its budget and its forecast, and names what else a person should know.

    Args:
        status: of the script.
    """
    measured, forecast = report.measured, report.forecast
    peaks = [f"{format_bytes(report.steady_peak_bytes, rounding='up')} in a step"]
    peaks[0] += f", foreseen {format_bytes(forecast.steady_process_bytes, rounding='up')}"
    if measured.first_step_peak_bytes:
        peaks.append(f"{format_bytes(measured.first_step_peak_bytes, rounding='up')} in the first")
    if report.outside_steps_bytes is not None:
        peaks.append(f"{format_bytes(report.outside_steps_bytes, rounding='up')} outside them")
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
        yield Text(f"{measured.num_replans} plans were made again, as a step needed more than foreseen.")
    if measured.oom_recoveries:
        yield Text(f"{measured.oom_recoveries} steps were done again after memory ran out.", style="yellow")
    for line in time_findings(report):
        yield Text(line, style="yellow")
    for path, reason in sorted(measured.not_recomputed.items()):
        yield Text(f"Not recomputed: '{path}': {reason}.", style="yellow")
