"""Makes the page of a CUDA memory snapshot: its devices' curves, who held the peak, and what would have saved."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from memwall.predict.snapshot.analysis import DeviceAnalysis
from memwall.predict.snapshot.timeline import UNKNOWN, Timeline, category_bytes
from memwall.report.curves import MOST_POINTS, STACK, CategoryLayer, Curve, kept_points
from memwall.report.grid import Grid, share_percent
from memwall.report.html import Card, Page
from memwall.report.snapshots.snapshot_grids import SNAPSHOT_SCOPE, snapshot_grids, snapshot_verdict
from memwall.units import format_bytes


def snapshot_page(devices: Sequence[tuple[DeviceAnalysis, Timeline]], title: str) -> Page:
    """Returns a page with everything there is to say about a snapshot.

    Args:
        devices: the one that holds most first.
    """
    analyses = [analysis for analysis, _ in devices]
    if not analyses:
        return Page(
            title=title,
            verdict=("no-budget", "the snapshot holds no memory and no history; was CUDA used before it was taken?"),
        )
    curves = [snapshot_curve(timeline, f"GPU {timeline.device}") for _, timeline in devices]
    notes = [note for analysis in analyses for note in _notes(analysis, is_alone=len(analyses) == 1)]
    return Page(
        title=title,
        verdict=("no-budget", "; ".join(snapshot_verdict(analysis) for analysis in analyses)),
        cards=_cards(analyses[0]),
        curves=tuple(curve for curve in curves if curve is not None),
        curves_title="Memory of the caching allocator, event by event",
        grids=tuple(grid for analysis in analyses for grid in _grids(analysis, is_alone=len(analyses) == 1)),
        notes=(*notes, SNAPSHOT_SCOPE),
    )


def _cards(analysis: DeviceAnalysis) -> tuple[Card, ...]:
    """Shows allocated, reserved and stranded of the device that holds most, and what settings could do about it."""
    used, held, search = analysis.peak.fragmentation, analysis.reserved_peak.fragmentation, analysis.settings
    cards = [
        Card("most in use", format_bytes(used.active_bytes), "allocated, or waiting for a stream"),
        Card(
            "most held", format_bytes(held.reserved_bytes), f"reserved; {format_bytes(held.active_bytes)} in use then"
        ),
        Card(
            "stranded then",
            format_bytes(held.stranded_bytes),
            f"{share_percent(held.stranded_bytes, held.reserved_bytes)} of it: free between blocks in use",
        ),
    ]
    if search is not None:
        best = "by the best found" if search.saved_bytes else "none is better"
        cards.append(Card("settings would save", format_bytes(search.saved_bytes), f"simulated, {best}"))
    return tuple(cards)


def _grids(analysis: DeviceAnalysis, *, is_alone: bool) -> tuple[Grid, ...]:
    grids = snapshot_grids(analysis)
    if is_alone:
        return grids
    return tuple(replace(grid, title=f"GPU {analysis.device}: {grid.title}") for grid in grids)


def _notes(analysis: DeviceAnalysis, *, is_alone: bool) -> list[str]:
    where = "" if is_alone else f"GPU {analysis.device}: "
    return [f"Note: {where}{note}." for note in analysis.notes]


STRANDED = "stranded"
IDLE = "idle segments"


def snapshot_curve(timeline: Timeline, name: str) -> Curve | None:
    """Returns one device's history over the events of its allocator; None where none was recorded.

    Args:
        timeline: with the categories of its recording's blocks, where the snapshot says any.
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
    stranded = timeline.split_free_bytes + timeline.expandable_free_bytes
    free = {STRANDED: stranded[kept], IDLE: timeline.idle_bytes[kept]}
    layers += [
        CategoryLayer(category=part, live_bytes=_numbers(values)) for part, values in free.items() if values.any()
    ]
    peak = timeline.reserved_peak
    return Curve(
        name=name,
        tag="external",
        position_unit="events",
        summary=f"most held {format_bytes(int(reserved[peak]))}, after event {peak} of {num_events}",
        positions=tuple(float(position) for position in kept),
        layers=tuple(layers),
        total_bytes=_numbers(reserved[kept]),
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
