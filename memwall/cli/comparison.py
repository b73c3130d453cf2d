"""Reads a file that is to be compared: its figures and its curves."""

from pathlib import Path

import msgspec
from msgspec import Struct

from memwall.report.comparison import plan_side, run_side, snapshot_side, trace_side
from memwall.report.curves import Curve, curve_of
from memwall.report.difference import Side, Source
from memwall.report.trace_grids import shown_steps
from memwall.trace.records import trace_tag


class ReadSide(Struct, frozen=True, kw_only=True):
    """Holds one of the two files; plans and runs keep peaks and have no curve."""

    side: Side
    total: Curve | None = None
    """Takes a trace's last step, over operations, for those do not vary; or a snapshot's bytes in use."""
    stacked: Curve | None = None
    """The same by category; of a snapshot with what lay free."""


def read_side(path: Path, kind: Source, label: str) -> ReadSide:
    """Reads a file to be compared.

    Args:
        label: heading of its curve.

    Raises:
        MemwallError: it cannot be read; the message names the file.
    """
    if kind == "trace":
        return _read_trace(path, label)
    if kind == "snapshot":
        return _read_snapshot(path, label)
    if kind == "plan":
        from memwall.planning.planfile import Plan

        return ReadSide(side=plan_side(Plan.load(path), str(path)))
    from memwall.observe.run_report import RunReport

    return ReadSide(side=run_side(RunReport.load(path), str(path)))


def _read_trace(path: Path, label: str) -> ReadSide:
    from memwall.trace.file import load_trace

    trace = load_trace(path)
    steps = shown_steps(trace)
    curve = None
    if steps:
        # Without what the process held before: a difference of tensors would not be seen above it.
        tensors = msgspec.structs.replace(trace, base_bytes=0)
        curve = curve_of(tensors, steps[-1], f"{label}, {steps[-1].kind} step", trace_tag(trace), has_times=False)
    return ReadSide(side=trace_side(trace, str(path)), total=curve, stacked=curve)


def _read_snapshot(path: Path, label: str) -> ReadSide:
    from memwall.predict.snapshot.analysis import analyse_device, devices_of
    from memwall.report.snapshots.snapshot_curves import snapshot_curve
    from memwall.trace.snapshot.read import load_snapshot

    snapshot = load_snapshot(path)
    analysed = [analyse_device(snapshot, device) for device in devices_of(snapshot)]
    side = snapshot_side(snapshot, [analysis for analysis, _ in analysed], str(path))
    if not analysed:
        return ReadSide(side=side)
    # The one that holds most.
    analysis, timeline = analysed[0]
    name = f"{label}, GPU {analysis.device}"
    return ReadSide(
        side=side,
        total=snapshot_curve(timeline, name, is_used_only=True),
        stacked=snapshot_curve(timeline, name),
    )
