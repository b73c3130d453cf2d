"""Runs `memwall top`: shows a run while it goes on."""

import time
from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, require_file


def top(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Steps that memwall run --metrics FILE writes, as JSON lines.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the present state and end.")] = False,
    every: Annotated[float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Look so often.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show the steps of a run that goes on: bytes against budget and forecast, seconds, what is moved. Ctrl-C ends."""
    require_file(path, expected="a file that memwall run --metrics FILE writes")
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from memwall.cli.output import Plain, show
    from memwall.errors import UsageError
    from memwall.observe.last_steps import last_steps
    from memwall.report.steps_view import steps_view

    console = Console()
    if once or as_json or not console.is_terminal:
        steps = last_steps(path)
        if not steps:
            raise UsageError(f"{path} has no step yet; a step is written when the next one has ended")
        show(steps_view(steps), steps[-1], as_json=as_json)
        return

    def shown() -> Plain:
        steps = last_steps(path)
        return Plain(steps_view(steps) if steps else Text("no step has ended yet"))

    try:
        with Live(shown(), console=console, auto_refresh=False) as live:
            while True:
                live.update(shown(), refresh=True)
                time.sleep(every)
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
