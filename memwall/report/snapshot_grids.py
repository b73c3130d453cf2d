"""Shows a CUDA memory snapshot as tables: the moments that matter, who held the peak, what pins free memory."""

from memwall.predict.curve import Share
from memwall.predict.snapshot.analysis import DeviceAnalysis, Moment
from memwall.report.grid import Grid, share_grid, share_percent
from memwall.units import format_bytes

SNAPSHOT_SCOPE = (
    "Counted: memory of torch's caching allocator. Not in it: the CUDA context, libraries that allocate for "
    "themselves (NCCL), other processes."
)
"""Says what the figures of a snapshot count, and what they leave out."""

_MOST_ROWS = 10
_WAITING = "waiting for a stream"
_EXPANDABLE = "free, expandable"
# Rows that most snapshots do not need.
_RARE = (_WAITING, _EXPANDABLE)


def snapshot_verdict(analysis: DeviceAnalysis) -> str:
    """Returns the peak and what fragmentation took of it, in one sentence."""
    peak = analysis.peak.fragmentation
    lost = share_percent(peak.stranded_bytes, peak.reserved_bytes)
    when = f"after event {analysis.peak.position} of {analysis.num_events}" if analysis.num_events else "at the end"
    return (
        f"peak {format_bytes(peak.active_bytes)} in use on GPU {analysis.device}, {when}; "
        f"{format_bytes(peak.reserved_bytes)} held, of which {format_bytes(peak.stranded_bytes)} ({lost}) lay free "
        "between blocks in use"
    )


def snapshot_grids(analysis: DeviceAnalysis) -> tuple[Grid, ...]:
    """Returns every table of one device; those without a row are left out."""
    grids = [
        moment_grid(analysis),
        failure_grid(analysis),
        *holder_grids(analysis),
        pin_grid(analysis),
    ]
    return tuple(grid for grid in grids if grid is not None and grid.rows)


def moment_grid(analysis: DeviceAnalysis) -> Grid:
    """Shows how the device's memory was used when most was in use, when most was held, and at the end."""
    moments = {moment.position: moment for moment in (analysis.final, analysis.reserved_peak, analysis.peak)}
    parts = [_parts(moments[position]) for position in sorted(moments)]
    shown = [name for name in parts[0] if name not in _RARE or any(part[name] != "0 B" for part in parts)]
    return Grid(
        title="Memory of the caching allocator",
        columns=("", *(moments[position].name for position in sorted(moments))),
        rows=tuple((name, *(part[name] for part in parts)) for name in shown),
    )


def failure_grid(analysis: DeviceAnalysis) -> Grid | None:
    """Shows allocations that failed, each with what was free where."""
    rows = tuple(
        (
            str(failure.position),
            format_bytes(failure.requested_bytes),
            format_bytes(failure.device_free_bytes),
            format_bytes(failure.fragmentation.stranded_bytes),
            format_bytes(failure.fragmentation.idle_bytes),
        )
        for failure in analysis.out_of_memory[:_MOST_ROWS]
    )
    if not rows:
        return None
    num_failures = len(analysis.out_of_memory)
    shown = "" if num_failures <= _MOST_ROWS else f", the first {_MOST_ROWS} of {num_failures}"
    return Grid(
        title=f"Out of memory{shown}",
        columns=("event", "asked for", "free on the device", "free between blocks", "free segments"),
        rows=rows,
        text_columns=(),
    )


def holder_grids(analysis: DeviceAnalysis) -> tuple[Grid, ...]:
    """Shows bytes at the peak by the user's line, and by category where the snapshot says any."""
    total_bytes = analysis.peak.fragmentation.active_bytes
    by_line = share_grid("In the peak, by line", "line", analysis.by_line, total_bytes)
    if [share.name for share in analysis.by_category] == ["unknown"]:
        return (by_line,)
    categories = [Share(name=share.name.replace("_", " "), num_bytes=share.num_bytes) for share in analysis.by_category]
    by_category = share_grid("In the peak, by category", "category", categories, total_bytes, most_rows=len(categories))
    return by_category, by_line


def pin_grid(analysis: DeviceAnalysis) -> Grid:
    """Shows segments that stayed held for a few blocks in them, when most was held."""
    more = analysis.num_pinned - len(analysis.pins)
    return Grid(
        title="Segments partly in use when most was held" + (f", {more} more not shown" if more else ""),
        columns=("largest block by", "segment", "free in it", "blocks"),
        rows=tuple(
            (pin.line, format_bytes(pin.num_bytes), format_bytes(pin.free_bytes), str(pin.num_blocks))
            for pin in analysis.pins
        ),
    )


def _parts(moment: Moment) -> dict[str, str]:
    """Returns the rows of one moment."""
    used = moment.fragmentation
    return {
        "after event": str(moment.position),
        "held from the device": format_bytes(used.reserved_bytes),
        "in tensors": format_bytes(used.allocated_bytes),
        _WAITING: format_bytes(used.pending_bytes),
        "free between blocks": format_bytes(used.split_free_bytes),
        _EXPANDABLE: format_bytes(used.expandable_free_bytes),
        "free in whole segments": format_bytes(used.idle_bytes),
        "fragmentation": share_percent(used.reserved_bytes - used.active_bytes, used.reserved_bytes),
        "largest free piece": format_bytes(moment.largest_free_bytes),
    }
