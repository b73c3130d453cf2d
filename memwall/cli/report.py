"""Runs `memwall report`: writes a trace, snapshot, plan or run as one page for a browser."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Struct

from memwall.cli.options import JsonOption, require_file, require_writable
from memwall.cli.running.run_file import run_page
from memwall.errors import UsageError
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.cli.source import Source
    from memwall.report.html import Page

_EXPECTED = (
    "a trace written by memwall profile, a plan written by memwall plan, a report written by memwall run --report, or "
    "a snapshot written by torch.cuda.memory._dump_snapshot()"
)


class Written(Struct, frozen=True, kw_only=True):
    """Says what was written, for scripts."""

    schema: str = "memwall.written/2"
    source: str
    source_kind: "Source"
    file: str
    num_bytes: int


def report(
    source: Annotated[
        Path, typer.Argument(metavar="TRACE|plan.json|run.json|SNAPSHOT", help="What the page is made of.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the page is written.")],
    as_json: JsonOption = False,
) -> None:
    """Write a page for a browser."""
    require_file(source, expected=_EXPECTED)
    require_writable(output, option="--output")
    if output.exists() and output.samefile(source):
        raise UsageError(f"--output: {output} is the file that is read; choose another name")
    from rich.text import Text

    from memwall.cli.output import show
    from memwall.cli.source import source_kind
    from memwall.report.html import save_page

    kind = source_kind(source, expected=_EXPECTED)
    pages = {"trace": _trace_page, "snapshot": _snapshot_page, "plan": _plan_page, "run": _run_page}
    save_page(pages[kind](source), output)
    written = Written(source=str(source), source_kind=kind, file=str(output), num_bytes=output.stat().st_size)
    show(Text(f"wrote {output} ({format_bytes(written.num_bytes)})"), written, as_json=as_json)


def _plan_page(source: Path) -> "Page":
    from memwall.planning.planfile import Plan
    from memwall.report.html import Page

    return Page(title=f"memwall plan: {source.name}", plan=Plan.load(source))


def _run_page(source: Path) -> "Page":
    from memwall.observe.run_report import RunReport

    return run_page(RunReport.load(source), source)


def _trace_page(source: Path) -> "Page":
    import msgspec

    from memwall.report.curves import curve_of
    from memwall.report.html import Page
    from memwall.report.text import trace_scope, trace_verdict
    from memwall.report.trace_grids import highest_point, phase_grid, process_note, shown_steps
    from memwall.trace.file import load_trace
    from memwall.trace.tags import trace_tag

    trace = load_trace(source)
    steps, highest = shown_steps(trace), highest_point(trace)
    if highest is None:
        raise UsageError(f"{source} holds no operation, so there is nothing to draw; record a whole training step")
    # Without what the process held before, as in the tables; the note says how much it is.
    tensors = msgspec.structs.replace(trace, base_bytes=0)
    return Page(
        title=f"memwall trace: {source.name}",
        verdict=trace_verdict(highest),
        curves=tuple(curve_of(tensors, step, f"{step.kind} step", trace_tag(trace)) for step in steps),
        grids=tuple(phase_grid(trace, step) for step in steps),
        notes=(*process_note(trace, highest), trace_scope(trace)),
    )


def _snapshot_page(source: Path) -> "Page":
    from memwall.cli.source import analysed_devices
    from memwall.report.snapshot_page import snapshot_page
    from memwall.trace.snapshot.read import load_snapshot

    return snapshot_page(analysed_devices(load_snapshot(source)), f"memwall snapshot: {source.name}")
