"""Makes the page of a CUDA memory snapshot: its devices' curves, who held the peak, and what would have saved."""

from collections.abc import Sequence

from msgspec.structs import replace

from memwall.predict.snapshot.analysis import DeviceAnalysis
from memwall.predict.snapshot.timeline import Timeline
from memwall.report.grid import Grid, share_percent
from memwall.report.html import Card, Page
from memwall.report.snapshots.snapshot_curves import snapshot_curve
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
