"""Thins the byte curve of a step for drawing: layers by category, phases, and the peak with its holders."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from memwall.predict.curve import Peak, live_curve, peak_of
from memwall.report.trace_grids import place_of
from memwall.trace.records import Category, Step, Storage, Tag, Trace
from memwall.units import format_bytes

PositionUnit = Literal["seconds", "operations"]

_MOST_POINTS = 2000
"""Limits one curve: more than a screen has columns, and few enough for a page of some megabytes."""
# From the longest lived to the shortest: what stays is at the bottom of the stack, what comes and goes on top.
_STACK: tuple[Category, ...] = (
    "parameter",
    "buffer",
    "optimizer_state",
    "gradient",
    "input",
    "activation",
    "temporary",
)


class CategoryLayer(Struct, frozen=True, kw_only=True):
    """Holds the bytes of one category at each point of a curve."""

    category: str
    live_bytes: tuple[int, ...]


class PhaseBand(Struct, frozen=True, kw_only=True):
    """Says where a phase begins and ends, in the unit of the curve's positions."""

    phase: str
    begin: float
    end: float


class Curve(Struct, frozen=True, kw_only=True):
    """Holds bytes over one step; each point holds until the next."""

    name: str
    tag: Tag
    """How the bytes were obtained; a simulated curve is never shown as a measured one."""
    position_unit: PositionUnit
    """Seconds of computing since the beginning; operations where no times are known."""
    summary: str
    """Says in a few words what there is to see in it."""
    positions: tuple[float, ...]
    layers: tuple[CategoryLayer, ...]
    total_bytes: tuple[int, ...]
    bands: tuple[PhaseBand, ...]
    peak_position: float
    peak: Peak | None = None
    """Who holds the peak, where modules are known."""
    budget_bytes: int | None = None
    process_peak_bytes: int | None = None
    """The meter showed this for the process over this step."""


def curve_of(
    trace: Trace,
    step: Step,
    name: str,
    tag: Tag,
    *,
    budget_bytes: int | None = None,
    process_peak_bytes: int | None = None,
    has_times: bool = True,
) -> Curve:
    """Returns the curve of one recorded or treated step, on top of what the process held before it.

    Args:
        trace: names and modules the step's indices point into, and the bytes below the curve.
        step: a step with at least one operation.
        name: heading of the curve, e.g. "free run".
        tag: how its bytes were obtained.
        budget_bytes: process bytes the run may use, drawn as a line.
        process_peak_bytes: what the meter showed over this very step, drawn as a line. Not simply the recorded step's:
            that one may have run with its saved tensors parked, or been treated since.
        has_times: draw it over seconds where they are known; otherwise over operations.
    """
    num_ops = len(step.ops)
    base_bytes = trace.base_bytes
    total = live_curve(step.storages, num_ops, device=trace.device) + base_bytes
    kept = kept_points(total, _MOST_POINTS)
    seconds = _op_clock(step) if has_times else None
    clock = np.arange(num_ops + 1, dtype=np.float64) if seconds is None else seconds
    # The last point repeats its value at the end of the step, so that the last operation has a width.
    points = np.append(kept, num_ops - 1)
    positions = np.append(clock[kept], clock[num_ops])
    layers = [
        CategoryLayer(category=category, live_bytes=_numbers(curve[points]))
        for category, curve in category_curves(trace, step).items()
    ]
    if base_bytes:
        layers.insert(0, CategoryLayer(category="base", live_bytes=(base_bytes,) * len(points)))
    peak = peak_of(trace, step)
    return Curve(
        name=name,
        tag=tag,
        position_unit="operations" if seconds is None else "seconds",
        summary=f"highest {format_bytes(int(total.max()))} in {place_of(peak)}",
        positions=tuple(float(position) for position in positions),
        layers=tuple(layers),
        total_bytes=_numbers(total[points]),
        bands=tuple(band for band in phase_bands(step, clock) if band.phase != "other"),
        peak_position=float(clock[peak.op]),
        peak=peak,
        budget_bytes=budget_bytes,
        process_peak_bytes=process_peak_bytes,
    )


def kept_points(curve: NDArray[np.int64], most: int) -> NDArray[np.intp]:
    """Returns indices to draw, at most `most`: of each stretch its first, lowest, highest and last point.

    No stretch loses its maximum, so the peak is always among them (Jugel et al., "M4: a visualization-oriented time
    series data aggregation", VLDB 2014, section 4).
    """
    if len(curve) <= most:
        return np.arange(len(curve))
    edges = np.linspace(0, len(curve), most // 4 + 1).astype(np.intp)
    kept: set[int] = set()
    for begin, end in pairwise(edges):
        stretch = curve[begin:end]
        kept |= {int(begin), int(begin + stretch.argmin()), int(begin + stretch.argmax()), int(end - 1)}
    return np.array(sorted(kept), dtype=np.intp)


def category_curves(trace: Trace, step: Step) -> dict[str, NDArray[np.int64]]:
    """Returns live bytes per category, bottom of the stack first; categories that never hold a byte are left out."""
    held: dict[Category, list[Storage]] = {}
    for storage in step.storages:
        held.setdefault(storage.category, []).append(storage)
    curves = {c: live_curve(held[c], len(step.ops), device=trace.device) for c in _STACK if c in held}
    return {category: curve for category, curve in curves.items() if curve.any()}


def _op_clock(step: Step, *, unit: float = 1.0) -> NDArray[np.float64] | None:
    """Returns when each operation begins, and when the step ends: [num_ops + 1]; None without times.

    Args:
        unit: what a second is to be.
    """
    seconds = np.array([op.seconds for op in step.ops])
    return np.concatenate(([0.0], np.cumsum(seconds * unit))) if seconds.any() else None


def clock_us(step: Step) -> NDArray[np.float64]:
    """Returns the clock of a step in microseconds, each of which stands for one operation where no times are known."""
    found = _op_clock(step, unit=1e6)
    return np.arange(len(step.ops) + 1, dtype=np.float64) if found is None else found


def phase_bands(step: Step, clock: NDArray[np.float64]) -> Iterator[PhaseBand]:
    """Gives the stretches of operations of one phase, those between the phases as "other"."""
    begin = 0
    for phase, ops in groupby(step.ops, key=lambda op: op.phase):
        end = begin + len(list(ops))
        yield PhaseBand(phase=phase, begin=float(clock[begin]), end=float(clock[end]))
        begin = end


def _numbers(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
