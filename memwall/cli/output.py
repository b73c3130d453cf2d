"""Sends output where it goes: one JSON object or tables to standard output, notes of a run to standard error."""

import os
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from memwall.trace.records import Tag

if TYPE_CHECKING:
    from rich.console import RenderableType

    from memwall.planning.forecast import Forecast
    from memwall.trace.records import Trace

_HIDDEN = ("Cc", "Cf", "Zl", "Zp")
"""Kinds of characters that a terminal acts on, or that turn the order of a line round (Unicode, general category)."""


class TraceSummary(Struct, frozen=True, kw_only=True):
    """Holds a trace in figures, for scripts."""

    schema: str = "memwall.trace-summary/1"
    tag: Tag
    device: str
    steps: list[dict[str, Any]]
    base_bytes: int
    micro_batch: int


def trace_summary(trace: "Trace") -> TraceSummary:
    """Returns peak, phase, categories and lines of every recorded step."""
    from msgspec.structs import asdict

    from memwall.predict.curve import peak_of, step_seconds
    from memwall.trace.records import trace_tag

    steps = []
    for step in trace.steps:
        peak = peak_of(trace, step)
        steps.append(
            {
                "kind": step.kind,
                "peak_live_bytes": peak.live_bytes,
                "peak_phase": peak.phase,
                "peak_module": peak.module,
                "by_category": {share.name: share.num_bytes for share in peak.by_category},
                "by_line": [asdict(share) for share in peak.by_line],
                "process_peak_bytes": step.process_peak_bytes,
                "compute_seconds": step_seconds(step),
                "num_ops": len(step.ops),
            }
        )
    return TraceSummary(
        tag=trace_tag(trace),
        device=trace.device,
        steps=steps,
        base_bytes=trace.base_bytes,
        micro_batch=trace.micro_batch,
    )


def forecast_status(forecast: "Forecast") -> int:
    """Returns the exit status: 0 fits, 3 does not, 4 fits only inside the margin."""
    if forecast.fits:
        return 0
    return 4 if forecast.budget_bytes is not None and forecast.peak.process_bytes <= forecast.budget_bytes else 3


def show(table: "RenderableType", record: Struct, *, as_json: bool, to_error: bool = False) -> None:
    """Shows the result of a command.

    Args:
        table: for a person.
        record: for `--json`.
        to_error: standard output belongs to the script that ran.
    """
    if as_json:
        import typer
        from msgspec.json import encode, format

        typer.echo(format(encode(record, order="sorted"), indent=2))
        return
    _console(to_error=to_error).print(Plain(table))


@contextmanager
def script_output(*, to_error: bool) -> Iterator[None]:
    """Sends a script's standard output, and its children's, to standard error while it runs with `--json`."""
    if not to_error:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def note(table: "RenderableType") -> None:
    """Shows something to read while a script runs."""
    _console(to_error=True).print(Plain(table))


def plain(text: str) -> str:
    r"""Returns a text in which control characters are written out: names in a file may be a stranger's.

    >>> plain("a\x1b]0;title\x07b\n\tc")
    'a\\x1b]0;title\\x07b\n\tc'
    """
    return "".join(one if one in "\n\t" or unicodedata.category(one) not in _HIDDEN else escaped(one) for one in text)


def escaped(character: str) -> str:
    r"""Returns what Python writes for a character in a string, as `\x1b`."""
    return character.encode("unicode_escape").decode()


class Plain:
    """Shows a table, a text or a group of both as they are, but for control characters in what they say."""

    def __init__(self, shown: "RenderableType") -> None:
        self._shown = shown

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yields the pieces of which rich makes what a terminal gets, styles apart."""
        from rich.segment import Segment

        for piece in console.render(self._shown, options):
            yield piece if piece.control else Segment(plain(piece.text), piece.style)


def _console(*, to_error: bool) -> Any:
    from rich.console import Console

    return Console(stderr=to_error)
