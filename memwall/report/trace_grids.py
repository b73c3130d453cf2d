"""Shows what is in a trace, as tables: phases of a step, holders at the peak, operators by time."""

from msgspec import Struct

from memwall.predict.curve import Peak, Share, live_curve, peak_of, step_seconds
from memwall.report.grid import Grid, seconds_or_dash, share_grid, share_percent
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes, format_seconds

PHASES = ("forward", "loss", "backward", "optimizer", "eval", "other")
"""Tables have them in this order."""
_BAR_WIDTH = 20
_MOST_ROWS = 10


class HighestPoint(Struct, frozen=True, kw_only=True):
    """Holds the highest peak of a trace, and the step it is in."""

    step: Step
    peak: Peak


def shown_steps(trace: Trace) -> tuple[Step, ...]:
    """Returns the first step and the last steady one: what differs between them is the optimizer's state."""
    chosen = [step for step in trace.steps if step.kind == "first" and step.ops][:1]
    chosen += [step for step in trace.steps if step.kind == "steady" and step.ops][-1:]
    return tuple(chosen)


def highest_point(trace: Trace) -> HighestPoint | None:
    """Returns the highest of the shown steps' peaks; None if no operation was recorded."""
    points = [HighestPoint(step=step, peak=peak_of(trace, step)) for step in shown_steps(trace)]
    return max(points, key=lambda point: point.peak.live_bytes, default=None)


def place_of(peak: Peak) -> str:
    """Returns the phase and the module a peak is in, for a sentence."""
    return peak.phase if peak.module == "(outside)" else f"{peak.phase} of {peak.module}"


def process_note(trace: Trace, highest: HighestPoint) -> tuple[str, ...]:
    """Returns one sentence on what the process held beside the tensors; none where the two cannot be compared.

    They can where the step ran as it is on the CPU, with its saved tensors in place, and the process could be metered.
    """
    held_bytes, live_bytes = highest.step.process_peak_bytes, highest.peak.live_bytes
    if trace.device != "cpu" or trace.is_parked or not held_bytes:
        return ()
    rest_bytes = held_bytes - live_bytes - trace.base_bytes
    rest = (
        f"; the other {format_bytes(rest_bytes)} are library workspaces, memory that the allocator keeps without a "
        "tensor in it, and the recording itself"
        if rest_bytes > 0
        else ""
    )
    return (
        f"The process held {format_bytes(held_bytes)} at most in this step, against {format_bytes(live_bytes)} of live "
        f"tensors at the peak and {format_bytes(trace.base_bytes)} from before the step{rest}.",
    )


def phase_peaks(trace: Trace, step: Step) -> dict[str, tuple[int, int]]:
    """Returns the most bytes that live in each phase of a step, and the operation where they do."""
    curve = live_curve(step.storages, len(step.ops), device=trace.device)
    ops = {phase: [k for k, op in enumerate(step.ops) if op.phase == phase] for phase in PHASES}
    highest = {phase: of[int(curve[of].argmax())] for phase, of in ops.items() if of}
    return {phase: (int(curve[k]), k) for phase, k in highest.items()}


def phase_grid(trace: Trace, step: Step) -> Grid:
    """Shows peak, time and number of operations of each phase of a step, with a bar of the peak."""
    peaks = phase_peaks(trace, step)
    highest_bytes, first = max(peaks.values(), key=lambda peak: (peak[0], -peak[1]))
    rows = []
    for phase, (peak_bytes, k) in peaks.items():
        bar = "█" * round(_BAR_WIDTH * peak_bytes / highest_bytes) if highest_bytes else ""
        marked = f"{bar} ◄ peak" if k == first else bar
        ops = [op for op in step.ops if op.phase == phase]
        seconds = sum(op.seconds for op in ops)
        rows.append((phase, format_bytes(peak_bytes), marked, seconds_or_dash(seconds or None), str(len(ops))))
    total = ("step", format_bytes(highest_bytes), "", seconds_or_dash(step_seconds(step) or None), str(len(step.ops)))
    return Grid(
        title="First step" if step.kind == "first" else "Steady step",
        columns=("phase", "peak live", "", "seconds", "ops"),
        rows=(*rows, total),
        text_columns=(0, 2),
    )


def holder_grids(peak: Peak) -> tuple[Grid, ...]:
    """Returns who holds the bytes at the peak: by category, by the user's line where the trace has lines, by module."""
    categories = [Share(name=share.name.replace("_", " "), num_bytes=share.num_bytes) for share in peak.by_category]
    grids = (
        share_grid("In the peak, by category", "category", categories, peak.live_bytes, most_rows=len(categories)),
        share_grid("In the peak, by line", "line", peak.by_line, peak.live_bytes),
        share_grid("In the peak, by module", "module", peak.by_module, peak.live_bytes),
    )
    return tuple(grid for grid in grids if grid.rows or grid.columns[0] != "line")


def op_grid(trace: Trace, step: Step) -> Grid | None:
    """Shows operators by measured time; None where nothing was measured, as on fake tensors."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    for op in step.ops:
        name = trace.names[op.name].removesuffix(".default")
        seconds[name] = seconds.get(name, 0.0) + op.seconds
        calls[name] = calls.get(name, 0) + 1
    total_seconds = sum(seconds.values())
    if not total_seconds:
        return None
    slowest = sorted(seconds, key=lambda name: (-seconds[name], name))[:_MOST_ROWS]
    rows = [
        (name, format_seconds(seconds[name]), share_percent(seconds[name], total_seconds), str(calls[name]))
        for name in slowest
    ]
    return Grid(title="Operators by time", columns=("operator", "seconds", "share", "calls"), rows=tuple(rows))
