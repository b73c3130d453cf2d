"""Makes reports for a terminal: rich renderables with the verdict first, which the command line prints."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from memwall.observe.run_report import RankSpread, RunReport
from memwall.planning.forecast import Forecast
from memwall.planning.planfile import Plan
from memwall.predict.snapshot.analysis import DeviceAnalysis
from memwall.report.difference import Difference
from memwall.report.difference_grids import difference_grids, difference_scope, difference_verdict
from memwall.report.estimate_grids import estimate_facts, workload_row
from memwall.report.grid import Grid
from memwall.report.plan_grids import Fit, action_grid, fit_of, forecast_phase_grid, lever_grid, plan_facts
from memwall.report.ranks_grids import ranks_grids
from memwall.report.run_grids import (
    Outcome,
    comparison_grid,
    run_grid,
    time_findings,
)
from memwall.report.snapshot_grids import SNAPSHOT_SCOPE, snapshot_grids, snapshot_verdict
from memwall.report.trace_grids import (
    HighestPoint,
    highest_point,
    holder_grids,
    op_grid,
    phase_grid,
    place_of,
    process_note,
    shown_steps,
)
from memwall.trace.records import Trace
from memwall.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memwall.planning.estimate import Estimate
    from memwall.trace.workload_facts import WorkloadFacts

Verdict = tuple[Fit, str]

_SIGNS = {
    "fits": ("✓", "green"),
    "inside-margin": ("~", "yellow"),
    "does-not-fit": ("✗", "red"),
    "no-budget": ("·", ""),
}
# For output whose encoding has none of them (LANG=C, old Windows consoles): printing must not fail there.
_ASCII = str.maketrans({"✓": "v", "✗": "x", "█": "#", "◄": "<", "·": "-"})


def trace_report(trace: Trace) -> Group:
    """Says what one training step of a trace holds, and when: `memwall profile`, `memwall explain TRACE`."""
    highest = highest_point(trace)
    if highest is None:
        return _report(Text("· no operation was recorded; a trace needs one whole training step"))
    step, peak = highest.step, highest.peak
    grids = [
        *(phase_grid(trace, shown) for shown in shown_steps(trace)),
        *holder_grids(peak),
        op_grid(trace, step),
    ]
    return _report(
        shown_verdict(trace_verdict(highest)),
        *(_table(grid) for grid in grids if grid is not None),
        *(Text(line) for line in process_note(trace, highest)),
        Text(trace_scope(trace), style="dim"),
    )


def trace_verdict(highest: HighestPoint) -> Verdict:
    """Returns the peak of a trace and where it is, in one sentence."""
    step, peak = highest.step, highest.peak
    return "no-budget", (
        f"peak {format_bytes(peak.live_bytes)} of live tensors, in {place_of(peak)} "
        f"({step.kind} step, operation {peak.op} of {len(step.ops)})"
    )


def trace_scope(trace: Trace) -> str:
    """Says what the figures of a trace count, and what they leave out."""
    times = "times are of the operations alone" if trace.source == "recorded" else "no times: nothing was computed"
    return (
        f"Counted: bytes of live tensors on {trace.device}; {times}. Not in them: {format_bytes(trace.base_bytes)} "
        f"held before the step (interpreter, libraries, data), {format_bytes(trace.workspace_bytes)} of library "
        "workspaces, memory the allocator holds but no tensor uses."
    )


def snapshot_report(analyses: Sequence[DeviceAnalysis]) -> Group:
    """Says what held the peak of each device of a CUDA snapshot: `memwall explain snapshot.pickle`."""
    parts: list[RenderableType] = []
    for analysis in analyses:
        parts.append(shown_verdict(("no-budget", snapshot_verdict(analysis))))
        parts += [_table(grid) for grid in snapshot_grids(analysis)]
        if analysis.notes:
            parts.append(Text("\n".join(f"Note: {note}." for note in analysis.notes)))
    if not parts:
        parts.append(Text("· the snapshot holds no memory and no history; was CUDA used before it was taken?"))
    return _report(*parts, Text(SNAPSHOT_SCOPE, style="dim"))


def difference_report(difference: Difference) -> Group:
    """Says what changed from one file to another of its kind: `memwall diff`."""
    return _report(
        shown_verdict(difference_verdict(difference)),
        *(_table(grid) for grid in difference_grids(difference)),
        Text(difference_scope(difference), style="dim"),
    )


def tables_of(grids: Iterable[Grid], workload: "WorkloadFacts | None") -> Group:
    """Returns tables, below the training step that they are for."""
    return _report(facts(workload_row(workload)), *(_table(grid) for grid in grids))


def estimate_report(estimate: "Estimate", searched: str = "") -> Group:
    """Returns what a step needs on a device that is not here, and what it is made of: `memwall estimate`.

    Args:
        searched: says which size was searched for and found; "" for none.
    """
    return _report(
        shown_verdict(forecast_verdict(estimate)),
        *((Text(searched),) if searched else ()),
        facts(estimate_facts(estimate)),
        *relaxations_of(estimate),
        *(_table(grid) for grid in (forecast_phase_grid(estimate), *holder_grids(estimate.in_peak))),
        Text(f"Predicted, not measured. Not modelled: {'; '.join(estimate.not_modelled)}.", style="dim"),
    )


def plan_report(plan: Plan, *, is_explained: bool = False) -> Group:
    """Shows a plan, why it is so, and what it does: `memwall plan`, `memwall explain plan.json`, `memwall run`.

    Args:
        is_explained: whether to say of a plan for ranks why no other way divides the model.
    """
    forecast = plan.forecast
    return _report(
        shown_verdict(plan_verdict(plan)),
        facts(plan_facts(plan)),
        *relaxations_of(forecast),
        _table(forecast_phase_grid(forecast)),
        _table(action_grid(plan.actions)),
        *((_table(lever_grid(forecast.levers)),) if forecast.levers else ()),
        *map(_table, ranks_grids(forecast.ranks, is_explained=is_explained)),
        Text(f"Not modelled: {'; '.join(forecast.not_modelled) or 'nothing known'}.", style="dim"),
    )


def relaxations_of(forecast: Forecast) -> tuple[Text, ...]:
    if not forecast.relaxations:
        return ()
    return (Text("\n".join(("What would make it fit:", *(f"  {line}" for line in forecast.relaxations)))),)


def plan_verdict(plan: Plan) -> Verdict:
    """Returns whether the plan fits, in one sentence."""
    return forecast_verdict(plan.forecast)


def forecast_verdict(forecast: Forecast) -> Verdict:
    fit, peak_bytes = fit_of(forecast), forecast.peak.process_bytes
    with_margin = f"{format_bytes(peak_bytes, rounding='up')} predicted + {format_bytes(forecast.margin_bytes)} margin"
    if forecast.budget_bytes is None or fit == "no-budget":
        return "no-budget", f"no budget given: {with_margin}"
    budget = format_bytes(forecast.budget_bytes, rounding="down")
    if fit == "fits":
        return fit, f"fits: {_what_fits(forecast, with_margin)} in a budget of {budget}"
    if fit == "inside-margin":
        return fit, f"fits only inside the margin: {with_margin}, budget {budget}"
    if forecast.passed_phases:
        return fit, f"does not fit: {_what_fits(forecast, with_margin)}, budget {budget}"
    over = format_bytes(peak_bytes + forecast.margin_bytes - forecast.budget_bytes, rounding="up")
    return fit, f"does not fit: {with_margin} is {over} over the budget of {budget}"


def _what_fits(forecast: Forecast, with_margin: str) -> str:
    """Says what keeps to the budget: not what had passed it before there was a plan, and was measured."""
    phases, over = forecast.phases, forecast.passed_phases
    rest_bytes = max((phase.process_bytes for name, phase in phases.items() if name not in over), default=0)
    if not over or not rest_bytes:
        return with_margin
    passed = ", ".join(
        f"the {name.replace('_', ' ')}'s measured {format_bytes(phases[name].process_bytes, rounding='up')}"
        for name in over
    )
    rest = format_bytes(rest_bytes, rounding="up")
    return f"after {passed}, {rest} predicted + {format_bytes(forecast.margin_bytes)} margin"


def run_report(report: RunReport, *, status: int = 0) -> Group:
    """Shows what a run measured beside what was predicted: `memwall run`, `memwall verify`.

    Args:
        status: of the script.
    """
    measured, forecast = report.measured, report.forecast
    run_facts = [f"{measured.steps} steps", f"{measured.oom_recoveries} recoveries from out of memory"]
    if measured.num_replans:
        run_facts.append(f"{measured.num_replans} plans made again")
    if measured.plan_seconds:
        run_facts.append(f"{format_seconds(measured.plan_seconds)} between first and second step for planning")
    return _report(
        shown_verdict(run_verdict(report, status=status)),
        _table(run_grid(report)),
        Text(f"Within the budget: {'no' if verify_status(report) == 5 else 'yes'}\nRun: {', '.join(run_facts)}."),
        *([] if report.ranks is None else [Text(f"Ranks: {ranks_text(report.ranks)}.")]),
        *(Text(line, style="yellow") for line in run_findings(report)),
        Text(
            f"Counted: bytes of the process on {forecast.device}; margin {format_bytes(forecast.margin_bytes)}. "
            f"Not modelled: {'; '.join(forecast.not_modelled) or 'nothing known'}.",
            style="dim",
        ),
    )


def run_findings(report: RunReport) -> list[str]:
    """Returns what of a run was not as the plan has it: times, blocks that were not recomputed, actions dropped."""
    return [
        *time_findings(report),
        *(f"Not recomputed: '{path}': {reason}." for path, reason in sorted(report.measured.not_recomputed.items())),
        *(f"Dropped: {name}: {reason}." for name, reason in sorted(report.measured.lost.items())),
        *(f"Not proven: {name}: {reason}." for name, reason in sorted(report.measured.unproven.items())),
    ]


def ranks_text(ranks: RankSpread) -> str:
    """Returns what the ranks of a run have measured, from the least to the most."""
    least, middle, most = map(format_bytes, (ranks.least_peak_bytes, ranks.median_peak_bytes, ranks.most_peak_bytes))
    line = (
        f"{ranks.num_ranks}; peak from {least} (rank {ranks.least_rank}) over {middle} (median) to {most} "
        f"(rank {ranks.most_rank}, which binds and is shown above)"
    )
    if ranks.least_step_seconds is not None and ranks.most_step_seconds is not None:
        slowest = format_seconds(ranks.most_step_seconds)
        line += f"; median step from {format_seconds(ranks.least_step_seconds)} to {slowest}"
    if ranks.without_report:
        line += f"; no report from rank {', '.join(map(str, ranks.without_report))}"
    return line


def run_verdict(report: RunReport, *, status: int = 0) -> Verdict:
    """Returns whether the run kept to its budget and its forecast, in one sentence.

    Args:
        status: of the script; one that failed may have needed more later.
    """
    fit, sentence = _verdict_of_steps(report)
    if not status or fit == "does-not-fit":
        return fit, sentence
    return "no-budget", f"the script ended with status {status}; until then {sentence}"


def _verdict_of_steps(report: RunReport) -> Verdict:
    budget = format_bytes(report.budget_bytes, rounding="down")
    status = verify_status(report)
    if status == 5:
        measured_bytes = report.judged_peak_bytes
        measured = f"{format_bytes(measured_bytes, rounding='up')} measured"
        over_bytes = measured_bytes - report.budget_bytes
        over = (
            f", {format_bytes(over_bytes, rounding='up')} over"
            if over_bytes > 0
            else " in the steps, more outside them"
        )
        where = ""
        if report.outside_steps_bytes is not None:
            where = (
                " outside the training steps, in evaluation, saving or other work of the script; "
                f"the steps reached {format_bytes(report.steady_peak_bytes, rounding='up')}; run again with a "
                f"budget of {format_bytes(measured_bytes + report.forecast.margin_bytes, rounding='up')}"
            )
        elif measured_bytes == report.measured.replaced_peak_bytes > report.steady_peak_bytes:
            where = (
                " in a step under a plan that another one has replaced since; the steps under that reached "
                f"{format_bytes(report.steady_peak_bytes, rounding='up')}"
            )
        return "does-not-fit", f"exceeded the budget of {budget}: {measured}{over}{where}"
    if status == 4:
        above, steady = (
            format_bytes(size, rounding="up") for size in (report.unexplained_bytes, report.steady_peak_bytes)
        )
        return "inside-margin", f"within the budget of {budget}, but {above} above the forecast: {steady} measured"
    return "fits", f"within the budget: {format_bytes(report.judged_peak_bytes, rounding='up')} measured of {budget}"


def verify_status(report: RunReport) -> int:
    """Returns the status of `memwall verify`: 0 within budget and forecast, 4 only inside the margin, 5 over budget."""
    # The run's own record counts too: it may have seen a peak outside the steps that are kept here.
    if not report.within_budget or report.judged_peak_bytes > report.budget_bytes:
        return 5
    return 4 if report.unexplained_bytes > 0 else 0


def comparison(rows: Sequence[Outcome]) -> Table:
    """Shows runs side by side, the first being what the others are compared with: `memwall demo`."""
    return _table(comparison_grid(rows))


class _Printable:
    """Draws its parts in ASCII where the output's encoding has no other signs."""

    def __init__(self, parts: Iterable[RenderableType]) -> None:
        self._parts = Group(*parts)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for segment in console.render(self._parts, options):
            plain = segment.text.translate(_ASCII) if options.ascii_only else segment.text
            yield Segment(plain, segment.style, segment.control)


def printable(parts: Iterable[RenderableType]) -> Group:
    """Returns parts to print one below the other, in signs that the output's encoding has."""
    return Group(_Printable(parts))


def _report(*parts: RenderableType) -> Group:
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [part] if not spaced else [Text(), part]
    return Group(_Printable(spaced))


def shown_verdict(verdict: Verdict) -> Text:
    """Returns a verdict with its sign and colour."""
    sign, colour = _SIGNS[verdict[0]]
    return Text(f"{sign} {verdict[1]}", style=f"bold {colour}".strip())


def facts(named: Iterable[tuple[str, str]]) -> Table:
    """Returns names and values side by side."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in named:
        # Text, not str: a module's path may look like rich's markup.
        table.add_row(Text(name), Text(value))
    return table


def _table(grid: Grid) -> Table:
    table = Table(
        title=grid.title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for index, column in enumerate(grid.columns):
        is_text = index in grid.text_columns
        table.add_column(Text(column), justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row in grid.rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
