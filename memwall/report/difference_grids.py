"""Shows two files beside each other, as tables with the verdict first."""

from memwall.report.difference import Change, Difference, Group
from memwall.report.grid import DASH, Grid, seconds_or_dash
from memwall.report.plan_grids import Fit
from memwall.units import format_bytes, format_seconds

_TITLES: dict[Group, str] = {
    "peak": "Peak",
    "quantity": "Quantities",
    "phase": "Peak by phase",
    "category": "In the peak, by category",
    "module": "In the peak, by module: what changed most",
    "line": "In the peak, by line: what changed most",
}
_COUNTED = {
    "trace": "bytes of live tensors",
    "plan": "bytes of the process, as predicted",
    "run": "bytes of the process, as measured",
    "snapshot": "memory of torch's caching allocator",
}


def difference_verdict(difference: Difference) -> tuple[Fit, str]:
    """Returns the peaks of both, and whether they grew by more than they may, in one sentence."""
    peaks = [change for change in difference.changes if change.group == "peak"]
    shown = "; ".join(f"{peak.name} {_from_to(peak)}" for peak in peaks) or "neither holds a byte"
    limit = difference.fail_over_percent
    if limit is None:
        return "no-budget", f"peak: {shown}"
    if difference.exceeds:
        return "does-not-fit", f"the peak grew by more than {limit:g}%: {shown}"
    return "fits", f"no peak grew by more than {limit:g}%: {shown}"


def difference_grids(difference: Difference) -> tuple[Grid, ...]:
    """Returns one table per group that has a row, bytes and percent; times last."""
    grids = []
    for group, title in _TITLES.items():
        rows = tuple(_row(change) for change in difference.changes if change.group == group)
        if rows:
            grids.append(Grid(title=title, columns=("", "A", "B", "change", "%"), rows=rows))
    before, after = difference.step.before_seconds, difference.step.after_seconds
    if before is not None or after is not None:
        grids.append(Grid(title="Step", columns=("", "A", "B", "change", "%"), rows=(_seconds_row(before, after),)))
    return tuple(grids)


def difference_scope(difference: Difference) -> str:
    """Says what A and B are, what is counted, and what they do not have in common."""
    lines = [
        f"A: {difference.before} ({difference.before_tag}). B: {difference.after} ({difference.after_tag}). "
        f"Counted: {_COUNTED[difference.kind]}."
    ]
    if difference.notes:
        lines.append(f"Not the same in both: {'; '.join(difference.notes)}.")
    return "\n".join(lines)


def percent_text(change: Change) -> str:
    """Returns signed growth; `new` for what was not there before."""
    if change.change_percent is not None:
        return f"{change.change_percent:+.1f}%" if change.change_bytes else "0.0%"
    return "new" if change.after_bytes else DASH


def _from_to(change: Change) -> str:
    return f"{format_bytes(change.before_bytes)} -> {format_bytes(change.after_bytes)} ({percent_text(change)})"


def _row(change: Change) -> tuple[str, ...]:
    return (
        change.name,
        format_bytes(change.before_bytes),
        format_bytes(change.after_bytes),
        ("+" if change.change_bytes > 0 else "") + format_bytes(change.change_bytes),
        percent_text(change),
    )


def _seconds_row(before: float | None, after: float | None) -> tuple[str, ...]:
    change = percent = DASH
    if before == after:
        change, percent = "0 s", "0.0%"
    elif before and after is not None:
        change = f"{'+' if after > before else ''}{format_seconds(after - before)}"
        percent = f"{100 * (after - before) / before:+.1f}%"
    return ("step", seconds_or_dash(before), seconds_or_dash(after), change, percent)
