"""`memwall explain`: what is in the peak of a trace, or why a plan is as it is."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, require_file


def explain(
    source: Annotated[Path, typer.Argument(metavar="TRACE|plan.json", help="Trace or plan file.")],
    as_json: JsonOption = False,
) -> None:
    """Show what makes the peak; for a plan, what each action saves and what binds."""
    require_file(source, expected="a trace written by memwall profile, or a plan written by memwall plan")
    from memwall.report.text import explain_file

    raise typer.Exit(explain_file(source, as_json=as_json))
