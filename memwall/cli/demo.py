"""Runs `memwall demo`: a small GPT on this machine, before and after."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, parse_budget


def demo(
    budget: Annotated[
        str, typer.Option("--budget", metavar="50%|SIZE", help="What to fit into; a percentage is of the plain peak.")
    ] = "50%",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep trace, plan, run and HTML report here.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a small GPT on text of this machine twice, plain and planned, and compare bytes, seconds and loss."""
    # Before the minutes of work; what a percentage is a part of is measured first by the demo itself.
    parse_budget(budget, device="cpu")
    from memwall.cli.demo_run import run_demo

    raise typer.Exit(run_demo(budget=budget, out=out, as_json=as_json))
