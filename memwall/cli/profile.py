"""Runs `memwall profile`: records the first steps of a script and shows what is in memory."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import CommandArgument, JsonOption, parse_command, require_writable
from memwall.cli.output import note, script_output, show, trace_summary


def profile(
    ctx: typer.Context,
    command: CommandArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the trace is written.")] = Path(
        "memwall.trace"
    ),
    steps: Annotated[int, typer.Option("--steps", min=1, help="Training steps to record.")] = 2,
    as_json: JsonOption = False,
) -> None:
    """Record the first steps of SCRIPT; print memory by phase, category and module."""
    script = parse_command(command, ctx)
    require_writable(output, option="--output")
    from memwall.integrations.launcher import profile_script
    from memwall.report.text import trace_report
    from memwall.trace.file import save_trace

    with script_output(to_error=as_json):
        trace = profile_script(script.name, script.arguments, num_steps=steps, is_module=script.is_module)
    save_trace(trace, output)
    show(trace_report(trace), trace_summary(trace), as_json=as_json)
    note(f"the trace is {output}; what would fit: memwall plan {output} --budget SIZE")
