"""Runs `memwall verify`: shows the forecast of a plan beside what a run measured."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, require_file


def verify(
    plan_path: Annotated[Path, typer.Argument(metavar="plan.json", help="Plan written by memwall plan.")],
    run_path: Annotated[Path, typer.Argument(metavar="run.json", help="Report written by memwall run --report.")],
    as_json: JsonOption = False,
) -> None:
    """Compare prediction with measurement, number by number."""
    require_file(plan_path, expected="a plan written by memwall plan -o plan.json")
    require_file(run_path, expected="a report written by memwall run --report run.json")
    from memwall.cli.output import show
    from memwall.observe.run_report import load_pair
    from memwall.report.text import run_report, verify_status

    report = load_pair(plan_path, run_path)
    show(run_report(report), report, as_json=as_json)
    raise typer.Exit(verify_status(report))
