"""Draws the history of a CUDA snapshot: what was in use by category, and on top of it what lay free."""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from memwall.predict.snapshot.timeline import UNKNOWN, Timeline, category_bytes
from memwall.report.curves import MOST_POINTS, STACK, Curve, Layer, PhaseBand, kept_points
from memwall.units import format_bytes

__all__ = ["IDLE", "STRANDED", "Begin", "snapshot_curve"]

# More are narrower than a line is wide.
_MOST_BANDS = 120

STRANDED = "stranded"
IDLE = "idle segments"


class Begin(Struct, frozen=True):
    """Says where a phase begins, by the machine's clock."""

    phase: str
    time_us: int


def snapshot_curve(
    timeline: Timeline, name: str, *, is_used_only: bool = False, phases: Sequence[Begin] = ()
) -> Curve | None:
    """Returns one device's history over the events of its allocator; None where none was recorded.

    Args:
        timeline: with the categories of its recording's blocks, where the snapshot says any.
        is_used_only: leave out what lay free.
        phases: in order; they are drawn where the events have times.
    """
    num_events = len(timeline.recording.events)
    if not num_events:
        return None
    reserved, active = timeline.reserved_bytes, timeline.active_bytes
    # The highest of one is not where the highest of the other is, and both are shown.
    kept = np.union1d(kept_points(reserved, MOST_POINTS // 2), kept_points(active, MOST_POINTS // 2))
    layers = [
        Layer(category=category, live_bytes=_numbers(values))
        for category, values in sorted(category_bytes(timeline, kept).items(), key=lambda item: _rank(item[0]))
    ]
    total = active
    if not is_used_only:
        total = reserved
        stranded = timeline.split_free_bytes + timeline.expandable_free_bytes
        free = {STRANDED: stranded[kept], IDLE: timeline.idle_bytes[kept]}
        layers += [Layer(category=part, live_bytes=_numbers(values)) for part, values in free.items() if values.any()]
    peak = timeline.active_peak if is_used_only else timeline.reserved_peak
    word = "in use" if is_used_only else "held"
    bands = _bands(phases, timeline, num_events)
    summary = f"most {word} {format_bytes(int(total[peak]))}, after event {peak} of {num_events}"
    if len(bands) > _MOST_BANDS:
        summary += f"; {len(bands)} phases are too many to be drawn"
    return Curve(
        name=name,
        tag="external",
        position_unit="events",
        summary=summary,
        positions=tuple(float(position) for position in kept),
        layers=tuple(layers),
        total_bytes=_numbers(total[kept]),
        bands=bands if len(bands) <= _MOST_BANDS else (),
        peak_position=float(peak),
    )


def _rank(category: str) -> tuple[int, str]:
    """Ranks known categories as in other curves, then those of other writers, then what nobody named."""
    if category in STACK:
        return STACK.index(category), ""
    return len(STACK) + (category == UNKNOWN), category


def _bands(phases: Sequence[Begin], timeline: Timeline, num_events: int) -> tuple[PhaseBand, ...]:
    if not phases or not timeline.time_us[-1]:
        return ()
    # A phase begins before the first event that is not earlier; number 0 is before the first event.
    begins = np.searchsorted(timeline.time_us[1:], [begin.time_us for begin in phases], side="left")
    edges = [*(int(begin) for begin in begins), num_events]
    return tuple(
        PhaseBand(phase=phase.phase, begin=float(begin), end=float(end))
        for phase, begin, end in zip(phases, edges[:-1], edges[1:], strict=True)
        if begin < end and phase.phase != "other"
    )


def _numbers(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
