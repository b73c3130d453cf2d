"""Runs `memwall report`: writes a trace, plan or run for a browser or a script, a trace for Perfetto too."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from msgspec import Struct

from memwall.cli.options import JsonOption, require_file, require_writable
from memwall.cli.running.run_file import run_page
from memwall.errors import UsageError
from memwall.units import format_bytes

if TYPE_CHECKING:
    from memwall.report.html import Page
    from memwall.trace.records import Trace

Format = Literal["html", "perfetto", "memory_viz", "json"]
Reported = Literal["trace", "plan", "run"]

_EXPECTED = (
    "a trace written by memwall profile, a plan written by memwall plan, or a report written by memwall run --report"
)
_FORMATS: dict[Reported, tuple[Format, ...]] = {
    "trace": ("html", "perfetto", "memory_viz", "json"),
    "plan": ("html", "json"),
    "run": ("html", "json"),
}
_SUFFIXES: tuple[tuple[str, Format], ...] = (
    (".perfetto.json", "perfetto"),
    (".json", "json"),
    (".html", "html"),
    (".htm", "html"),
    (".pickle", "memory_viz"),
    (".pkl", "memory_viz"),
)


class Written(Struct, frozen=True, kw_only=True):
    """Says what was written, for scripts."""

    schema: str = "memwall.written/1"
    source: str
    source_kind: Reported
    format: Format
    file: str
    num_bytes: int


def report(
    source: Annotated[Path, typer.Argument(metavar="TRACE|plan.json|run.json", help="What the report is made of.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the report is written.")],
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="html|perfetto|memory_viz|json",
            help="By default what FILE's name says: .html, .perfetto.json, .pickle, .json.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a report for a browser, for ui.perfetto.dev, for pytorch.org/memory_viz, or for scripts."""
    require_file(source, expected=_EXPECTED)
    require_writable(output, option="--output")
    if output.exists() and output.samefile(source):
        raise UsageError(f"--output: {output} is the file that is read; choose another name")
    chosen = _format(format_name, output)
    kind, writers = _writers(source)
    if chosen not in _FORMATS[kind]:
        raise UsageError(
            f"--format {chosen}: a {kind} cannot be shown so; {source} can be written as {', '.join(_FORMATS[kind])}"
        )
    writers[chosen](output)
    written = Written(
        source=str(source), source_kind=kind, format=chosen, file=str(output), num_bytes=output.stat().st_size
    )
    from rich.text import Text

    from memwall.cli.output import show

    show(Text(f"wrote {output} ({chosen}, {format_bytes(written.num_bytes)})"), written, as_json=as_json)


def _format(name: str | None, output: Path) -> Format:
    if name is not None:
        for known in _FORMATS["trace"]:
            if name == known:
                return known
        raise UsageError(f"--format: '{name}' is not known; expected {', '.join(_FORMATS['trace'])}")
    for suffix, meant in _SUFFIXES:
        if output.name.lower().endswith(suffix):
            return meant
    return "html"


_Writers = dict[Format, Callable[[Path], None]]


def _writers(source: Path) -> tuple[Reported, _Writers]:
    """Returns what a file is, and how each format of it is written."""
    from memwall.cli.source import source_kind

    kind = source_kind(source, expected=_EXPECTED)
    if kind == "snapshot":
        raise UsageError(
            f"{source} is a CUDA memory snapshot, which `memwall explain` shows, and pytorch.org/memory_viz as it is; "
            f"expected {_EXPECTED}"
        )
    makers = {"trace": _trace_writers, "plan": _plan_writers, "run": _run_writers}
    return kind, makers[kind](source)


def _trace_writers(source: Path) -> _Writers:
    from memwall.cli.output import trace_summary
    from memwall.report.html import save_page
    from memwall.report.memory_viz import save_memory_viz
    from memwall.report.perfetto import save_perfetto
    from memwall.trace.file import load_trace

    trace = load_trace(source)
    return {
        "html": lambda path: save_page(_trace_page(trace, source), path),
        "perfetto": lambda path: save_perfetto(trace, path),
        "memory_viz": lambda path: save_memory_viz(trace, path),
        "json": lambda path: _save_json(trace_summary(trace), path),
    }


def _plan_writers(source: Path) -> _Writers:
    from memwall.planning.planfile import Plan
    from memwall.report.html import Page, save_page

    plan = Plan.load(source)
    page = Page(title=f"memwall plan: {source.name}", plan=plan)
    return {"html": lambda path: save_page(page, path), "json": lambda path: _save_json(plan.forecast, path)}


def _run_writers(source: Path) -> _Writers:
    from memwall.observe.run_report import RunReport
    from memwall.report.html import save_page

    run = RunReport.load(source)
    page = run_page(run, source)
    return {"html": lambda path: save_page(page, path), "json": run.save}


def _trace_page(trace: "Trace", source: Path) -> "Page":
    import msgspec

    from memwall.report.curves import curve_of
    from memwall.report.html import Page
    from memwall.report.text import trace_scope, trace_verdict
    from memwall.report.trace_grids import highest_point, phase_grid, process_note, shown_steps
    from memwall.trace.records import trace_tag

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


def _save_json(record: Struct, path: Path) -> None:
    from memwall.versioned_files import json_bytes, whole_file

    with whole_file(path) as file:
        file.write(json_bytes(record))
