"""Runs `memwall explain`: says what is in the peak of a trace or a CUDA snapshot, or why a plan is as it is."""

from pathlib import Path
from typing import Annotated

import typer

from memwall.cli.options import JsonOption, require_file
from memwall.errors import UsageError


def explain(
    source: Annotated[
        Path, typer.Argument(metavar="TRACE|SNAPSHOT|plan.json", help="Trace, CUDA memory snapshot or plan file.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show what makes the peak; for a plan, what each action saves and what binds."""
    require_file(
        source,
        expected="a trace written by memwall profile, a snapshot written by torch.cuda.memory._dump_snapshot(), "
        "or a plan written by memwall plan",
    )
    from memwall.cli.output import show, trace_summary
    from memwall.cli.source import kind_of
    from memwall.report.text import plan_report, snapshot_report, trace_report

    kind = kind_of(source)
    if kind == "trace":
        from memwall.trace.file import load_trace

        trace = load_trace(source)
        show(trace_report(trace), trace_summary(trace), as_json=as_json)
    elif kind == "snapshot":
        from memwall.cli.source import snapshot_summary
        from memwall.trace.snapshot.read import load_snapshot

        summary = snapshot_summary(load_snapshot(source))
        show(snapshot_report(summary.devices), summary, as_json=as_json)
    elif kind == "json":
        from memwall.planning.planfile import Plan

        plan = Plan.load(source)
        show(plan_report(plan, is_explained=True), plan.forecast, as_json=as_json)
    else:
        raise UsageError(
            f"{source} is neither a trace nor a CUDA memory snapshot nor a plan; expected a file written by "
            "`memwall profile -o FILE`, torch.cuda.memory._dump_snapshot(FILE) or `memwall plan -o FILE`"
        )
