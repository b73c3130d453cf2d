"""Runs `memwall diff`: shows two files of one kind beside each other, with a verdict for CI."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import JsonOption, require_file
from memwall.errors import UsageError

if TYPE_CHECKING:
    from memwall.report.difference import Side, Source

_EXPECTED = (
    "two traces (memwall profile), two plans (memwall plan), two run reports (memwall run --report), or two snapshots "
    "(torch.cuda.memory._dump_snapshot())"
)


def diff(
    before: Annotated[Path, typer.Argument(metavar="A", help="Trace, plan, run report or CUDA memory snapshot.")],
    after: Annotated[Path, typer.Argument(metavar="B", help="Another of the same kind.")],
    fail_over: Annotated[
        str | None,
        typer.Option(
            "--fail-over", metavar="PCT", help="Exit with 3 if the peak of B is more than PCT percent above A's."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed from A to B: peak, phases, who holds it."""
    percent = None if fail_over is None else _percent(fail_over)
    for path in (before, after):
        require_file(path, expected=_EXPECTED)
    from memwall.cli.output import show
    from memwall.cli.source import source_kind
    from memwall.report.difference import difference_of, exit_status
    from memwall.report.text import difference_report

    kinds = [source_kind(path, expected=_EXPECTED) for path in (before, after)]
    if kinds[0] != kinds[1]:
        hint = "; memwall verify compares a plan with its run" if set(kinds) == {"plan", "run"} else ""
        raise UsageError(
            f"{before} is a {kinds[0]}, {after} is a {kinds[1]}; expected two files of one kind: {_EXPECTED}{hint}"
        )
    first, second = (_side(path, kind) for path, kind in zip((before, after), kinds, strict=True))
    difference = difference_of(first, second, fail_over_percent=percent)
    show(difference_report(difference), difference, as_json=as_json)
    raise typer.Exit(exit_status(difference))


def _percent(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent < float("inf"):
        raise UsageError(f"--fail-over: '{text}' is no percentage; expected a number such as 5, 2.5 or 0")
    return percent


def _side(path: Path, kind: "Source") -> "Side":
    """Returns the figures of a file; raises where it cannot be read, in a message that names it."""
    from memwall.report.comparison import plan_side, run_side, snapshot_side, trace_side

    if kind == "trace":
        from memwall.trace.file import load_trace

        return trace_side(load_trace(path), str(path))
    if kind == "snapshot":
        from memwall.predict.snapshot.analysis import analyse_device, devices_of
        from memwall.trace.snapshot.read import load_snapshot

        snapshot = load_snapshot(path)
        analyses = [analyse_device(snapshot, device)[0] for device in devices_of(snapshot)]
        return snapshot_side(snapshot, analyses, str(path))
    if kind == "plan":
        from memwall.planning.planfile import Plan

        return plan_side(Plan.load(path), str(path))
    from memwall.observe.run_report import RunReport

    return run_side(RunReport.load(path), str(path))
