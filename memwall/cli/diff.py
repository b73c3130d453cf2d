"""Runs `memwall diff`: shows two files of one kind beside each other, with a verdict for CI."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.cli.options import JsonOption, require_file, require_writable
from memwall.errors import UsageError

if TYPE_CHECKING:
    from memwall.cli.comparison import ReadSide
    from memwall.report.difference import Difference

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
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="page.html", help="Also write a page with both curves.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what changed from A to B: peak, phases, who holds it."""
    percent = None if fail_over is None else _percent(fail_over)
    for path in (before, after):
        require_file(path, expected=_EXPECTED)
    if output is not None:
        require_writable(output, option="--output")
        for path in (before, after):
            if output.exists() and output.samefile(path):
                raise UsageError(f"--output: {output} is a file that is read; choose another name")
    from memwall.cli.comparison import read_side
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
    first, second = read_side(before, kinds[0], "A"), read_side(after, kinds[1], "B")
    difference = difference_of(first.side, second.side, fail_over_percent=percent)
    if output is not None:
        _save_page(difference, first, second, output)
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


def _save_page(difference: "Difference", first: "ReadSide", second: "ReadSide", output: Path) -> None:
    from memwall.report.difference_grids import difference_grids, difference_scope, difference_verdict
    from memwall.report.html import Page, save_page

    page = Page(
        title=f"memwall diff: {Path(difference.before).name} and {Path(difference.after).name}",
        verdict=difference_verdict(difference),
        overlaid=(first.total, second.total) if first.total is not None and second.total is not None else None,
        curves=tuple(side.stacked for side in (first, second) if side.stacked is not None),
        curves_title="Each by category",
        grids=difference_grids(difference),
        notes=tuple(difference_scope(difference).split("\n")),
    )
    save_page(page, output)
