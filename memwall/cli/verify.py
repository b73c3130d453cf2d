"""`memwall verify`: the forecast of a plan beside what a run measured."""

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
    from memwall.observe.verify import verify_run
    from memwall.report.text import show_verification

    raise typer.Exit(show_verification(verify_run(plan_path, run_path), as_json=as_json))
