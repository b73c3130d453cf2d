"""`memwall explain`: what is in the peak of a trace, or why a plan is as it is."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, require_file
from memwall.errors import UsageError


def explain(
    source: Annotated[Path, typer.Argument(metavar="TRACE|plan.json", help="Trace or plan file.")],
    as_json: JsonOption = False,
) -> None:
    """Show what makes the peak; for a plan, what each action saves and what binds."""
    require_file(source, expected="a trace written by memwall profile, or a plan written by memwall plan")
    from memwall.cli.output import show, trace_summary
    from memwall.report.text import plan_report, trace_report
    from memwall.trace.file import MAGIC, load_trace

    if source.read_bytes()[: len(MAGIC)] == MAGIC:
        trace = load_trace(source)
        show(trace_report(trace), trace_summary(trace), as_json=as_json)
    elif not source.read_bytes().lstrip().startswith(b"{"):
        raise UsageError(
            f"{source} is neither a trace nor a plan; expected a file written by `memwall profile -o FILE` or "
            "`memwall plan -o FILE`"
        )
    else:
        from memwall.plan.planfile import Plan

        plan = Plan.load(source)
        show(plan_report(plan), plan.forecast, as_json=as_json)
