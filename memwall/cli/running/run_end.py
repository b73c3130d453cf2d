"""Says how a run ended, with its figures against the forecast, and ends the command with the run's exit status."""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from memwall.cli.options import Script
from memwall.cli.running.run_file import is_page, save_run
from memwall.cli.verbosity import is_verbose
from memwall.machine.launched import Launched, launched
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.checkpoint.step_checkpoint import StepCheckpoint
    from memwall.observe.run_report import RunReport
    from memwall.planning.planfile import Plan
    from memwall.session.session import Session


def end_run(
    session: "Session",
    script: Script,
    status: int,
    *,
    given: "Plan | None" = None,
    checkpoint: "StepCheckpoint | None" = None,
    report_path: Path | None = None,
    as_json: bool = False,
) -> NoReturn:
    """Shows what a session has measured, and ends the command.

    Args:
        status: the script's own.
        given: the plan, where it was not made in the run.
        report_path: where forecast and measurement are written.
    """
    from memwall.cli.output import show
    from memwall.observe.measure import run_report
    from memwall.observe.rank_spread import rank_file_name, report_of_all
    from memwall.report.summary import run_summary
    from memwall.report.text import run_report as run_table

    if session.measured.num_steps == 0 and status == 0 and (checkpoint is None or checkpoint.is_new):
        unwritten = [f"no {report_path}"] * (report_path is not None) + ["no JSON"] * as_json
        raise typer.Exit(_judged_without_plan(script.target, session, given, unwritten))
    if session.plan is None or session.measured.num_steps == 0:
        ending = f"memwall: {script.target} ended with status {status} before a step under a plan"
        typer.echo(f"{ending}; there is nothing to report", err=True)
        raise typer.Exit(status)
    report = run_report(session, script=script.target)
    if session.ranks is not None:
        joint = report_of_all(report, session.ranks, has_failed=status != 0)
        if joint is None:  # rank 0 reports
            raise typer.Exit(status)
        report = joint
    elif report_path is not None:
        report_path = report_path.with_name(rank_file_name(report_path.name))
    if report_path is not None:
        save_run(report, report_path, session.plan, session.trace)
    shown_run = run_table if is_verbose() else run_summary
    show(shown_run(report, status=status), report, as_json=as_json, to_error=True)
    if status or report.within_budget:
        raise typer.Exit(status)
    here = launched()
    seen = "" if report_path is None or is_page(report_path) else f" (within_budget is false in {report_path})"
    raise typer.Exit(_status_over_budget(here, _names_over_budget(report, here), seen))


def end_run_as_it_is(script: Script, status: int, *, budget_bytes: int, peak_bytes: int, has_told: bool) -> NoReturn:
    """Says what a run held that nothing was done for, where that was not said yet, and ends the command.

    Args:
        has_told: whether it was said before that the run has room, which holds up to a quarter of the budget.
    """
    is_over = peak_bytes > budget_bytes
    if status and not has_told:
        ending = f"memwall: {script.target} ended with status {status} before a step under a plan"
        typer.echo(f"{ending}; there is nothing to report", err=True)
    elif peak_bytes > budget_bytes // 2:
        held, budget = format_bytes(peak_bytes, rounding="up"), format_bytes(budget_bytes, rounding="down")
        typer.echo(
            f"memwall: {script.target} held {held}, {'over' if is_over else 'within'} the budget of {budget}; nothing "
            "was done, since no step began after that",
            err=True,
        )
    if status or not is_over:
        raise typer.Exit(status)
    here = launched()
    raise typer.Exit(_status_over_budget(here, _rank_of(here)))


def _status_over_budget(here: Launched, who: str, seen: str = "") -> int:
    """Returns the status of a complete run that exceeded its budget; to a launcher's process it says why that is 0."""
    if not here.by_launcher:
        return 5
    typer.echo(
        f"memwall: {who} exceeded its budget; the exit status is 0 all the same, and not 5: the launcher takes any "
        f"other for a failure, and would end or restart all ranks of a run that is complete{seen}",
        err=True,
    )
    return 0


def _judged_without_plan(target: str, session: "Session", given: "Plan | None", unwritten: list[str]) -> int:
    """Says how a run ended that memwall had no part in; returns the exit status.

    Args:
        unwritten: what was asked for, and is not written since there is no forecast and no step to compare.
    """
    budget_bytes = session.budget_bytes or (0 if given is None else given.forecast.budget_bytes or 0)
    peak_bytes = max(session.measured.overall_peak_bytes, session.measured.meter.peak_bytes())
    is_over = 0 < budget_bytes < peak_bytes
    held = f"it held {format_bytes(peak_bytes, rounding='up')}"
    if budget_bytes:
        over = format_bytes(budget_bytes, rounding="down")
        held += f", {'over' if is_over else 'within'} the budget of {over}"
    nothing = f"; without a step under a plan {' and '.join(unwritten)} is written" if unwritten else ""
    typer.echo(
        f"memwall: {target} trained in a way that memwall has no part in, and ran as it is without it: {held}. Models "
        "are planned that are called as model(batch), not by .forward or torch.func, and trained by "
        f"loss.backward(){nothing}",
        err=True,
    )
    here = launched()
    return _status_over_budget(here, _rank_of(here)) if is_over else 0


def _names_over_budget(report: "RunReport", here: Launched) -> str:
    """Returns the names of the ranks that exceeded the budget."""
    if report.ranks is None:
        return _rank_of(here)
    return f"rank {', '.join(map(str, report.ranks.over_budget))} of {report.ranks.num_ranks}"


def _rank_of(here: Launched) -> str:
    return f"rank {here.rank} of {here.num_ranks}"
