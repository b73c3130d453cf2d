"""Draws the history of a CUDA snapshot: what was in use by category, and on top of it what lay free."""

import numpy as np
from numpy.typing import NDArray

from memwall.predict.snapshot.timeline import UNKNOWN, Timeline, category_bytes
from memwall.report.curves import MOST_POINTS, STACK, CategoryLayer, Curve, kept_points
from memwall.units import format_bytes

STRANDED = "stranded"
IDLE = "idle segments"


def snapshot_curve(timeline: Timeline, name: str, *, is_used_only: bool = False) -> Curve | None:
    """Returns one device's history over the events of its allocator; None where none was recorded.

    Args:
        timeline: with the categories of its recording's blocks, where the snapshot says any.
        is_used_only: leave out what lay free.
    """
    num_events = len(timeline.recording.events)
    if not num_events:
        return None
    reserved, active = timeline.reserved_bytes, timeline.active_bytes
    # The highest of one is not where the highest of the other is, and both are shown.
    kept = np.union1d(kept_points(reserved, MOST_POINTS // 2), kept_points(active, MOST_POINTS // 2))
    layers = [
        CategoryLayer(category=category, live_bytes=_numbers(values))
        for category, values in sorted(category_bytes(timeline, kept).items(), key=lambda item: _rank(item[0]))
    ]
    total = active
    if not is_used_only:
        total = reserved
        stranded = timeline.split_free_bytes + timeline.expandable_free_bytes
        free = {STRANDED: stranded[kept], IDLE: timeline.idle_bytes[kept]}
        layers += [
            CategoryLayer(category=part, live_bytes=_numbers(values)) for part, values in free.items() if values.any()
        ]
    peak = timeline.active_peak if is_used_only else timeline.reserved_peak
    word = "in use" if is_used_only else "held"
    summary = f"most {word} {format_bytes(int(total[peak]))}, after event {peak} of {num_events}"
    return Curve(
        name=name,
        tag="external",
        position_unit="events",
        summary=summary,
        positions=tuple(float(position) for position in kept),
        layers=tuple(layers),
        total_bytes=_numbers(total[kept]),
        bands=(),
        peak_position=float(peak),
    )


def _rank(category: str) -> tuple[int, str]:
    """Ranks known categories as in other curves, then those of other writers, then what nobody named."""
    if category in STACK:
        return STACK.index(category), ""
    return len(STACK) + (category == UNKNOWN), category


def _numbers(values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(value) for value in values)
