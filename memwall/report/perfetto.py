"""Writes traces as Chrome JSON, for ui.perfetto.dev and chrome://tracing.

Counter tracks show bytes, slices show phases, modules and operations. Format: "Trace Event Format"
(docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), times in microseconds. Where no times are
known a microsecond stands for one operation, and the file says so.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from memwall.predict.curve import module_name
from memwall.report.curves import category_curves, phase_bands
from memwall.report.curves import clock_us as step_clock_us
from memwall.trace.records import Step, Trace
from memwall.versioned_files import whole_file

_Json = dict[str, Any]
_PHASES, _OPS, _MODULES = 1, 2, 10


def save_perfetto(trace: Trace, path: Path) -> None:
    """Writes a trace as one JSON file, event by event.

    Raises:
        UsageError: the file cannot be written.
    """
    encode = msgspec.json.Encoder().encode
    with whole_file(path) as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(_about_trace(trace)) + b',"traceEvents":[\n')
        separator = b""
        for event in trace_events(trace):
            file.write(separator + encode(event))
            separator = b",\n"
        file.write(b"\n]}\n")


def trace_events(trace: Trace) -> Iterator[_Json]:
    """Gives every step of a trace, one after another, each as a process of its own."""
    begin_us = 0.0
    for pid, step in enumerate((step for step in trace.steps if step.ops), start=1):
        clock_us = begin_us + step_clock_us(step)
        yield _name("process_name", pid, 0, f"{step.kind} step ({trace.device}, {trace.source})")
        yield from _phase_slices(step, clock_us, pid)
        yield from _module_slices(trace, step, clock_us, pid)
        yield from _op_slices(trace, step, clock_us, pid)
        yield from _live_counters(trace, step, clock_us, pid)
        begin_us = float(clock_us[-1])


def _phase_slices(step: Step, clock_us: NDArray[np.float64], pid: int) -> Iterator[_Json]:
    yield _name("thread_name", pid, _PHASES, "phases")
    for band in phase_bands(step, clock_us):
        yield _slice(band.phase, "phase", band.begin, band.end, pid, _PHASES)


def _module_slices(trace: Trace, step: Step, clock_us: NDArray[np.float64], pid: int) -> Iterator[_Json]:
    spans = []
    for call in step.calls:
        name = module_name(trace, call.module)
        spans.append((call.start, call.end, name))
        spans.append((call.backward_start, call.backward_end, f"{name} (backward)"))
    placed = ((clock_us[begin], clock_us[end], name) for begin, end, name in spans if 0 <= begin < end)
    # Slices that lie inside each other are on one track; those that only overlap go to a further one.
    lanes: list[list[float]] = []
    for begin_us, end_us, name in sorted(placed, key=lambda span: (span[0], -span[1], span[2])):
        lane = _free_lane(lanes, begin_us, end_us)
        if lane == len(lanes):
            lanes.append([])
            yield _name("thread_name", pid, _MODULES + lane, "modules" if lane == 0 else f"modules ({lane + 1})")
        lanes[lane].append(end_us)
        yield _slice(name, "module", begin_us, end_us, pid, _MODULES + lane)


def _op_slices(trace: Trace, step: Step, clock_us: NDArray[np.float64], pid: int) -> Iterator[_Json]:
    yield _name("thread_name", pid, _OPS, "operations")
    for k, op in enumerate(step.ops):
        found = _slice(trace.names[op.name], "operation", clock_us[k], clock_us[k + 1], pid, _OPS)
        found["args"] = {"operation": k, "module": module_name(trace, op.module), "flops": op.flops}
        yield found


def _live_counters(trace: Trace, step: Step, clock_us: NDArray[np.float64], pid: int) -> Iterator[_Json]:
    curves = dict(sorted(category_curves(trace, step).items()))
    if not curves:
        return
    table = np.stack(list(curves.values()), axis=1)
    for k in _changes(table):
        values = {name: int(num_bytes) for name, num_bytes in zip(curves, table[k], strict=True)}
        yield _counter("live bytes", clock_us[k], pid, values)
    # A counter holds until its next point; without this one the last level would have no end.
    yield _counter(
        "live bytes", clock_us[-1], pid, {name: int(value) for name, value in zip(curves, table[-1], strict=True)}
    )


def _about_trace(trace: Trace) -> _Json:
    has_times = any(op.seconds for step in trace.steps for op in step.ops)
    return {
        "source": "memwall trace",
        "device": trace.device,
        "torch_version": trace.torch_version,
        "microsecond": "measured time of the operations alone" if has_times else "one operation: no times are known",
        "base_bytes": trace.base_bytes,
    }


def _free_lane(lanes: list[list[float]], begin: float, end: float) -> int:
    """Returns the first lane whose open slices enclose a new one; a new lane where none does."""
    for lane, ends in enumerate(lanes):
        while ends and ends[-1] <= begin:
            ends.pop()
        if not ends or end <= ends[-1]:
            return lane
    return len(lanes)


def _changes(table: NDArray[np.int64]) -> list[int]:
    """Rows that differ from the one before; the first always does."""
    if not len(table):
        return []
    return [0, *(np.flatnonzero((table[1:] != table[:-1]).any(axis=1)) + 1).tolist()]


def _slice(name: str, kind: str, begin_us: float, end_us: float, pid: int, tid: int) -> _Json:
    # To the nanosecond: more digits say nothing and fill the file.
    begin, end = round(float(begin_us), 3), round(float(end_us), 3)
    return {"name": name, "cat": kind, "ph": "X", "ts": begin, "dur": round(end - begin, 3), "pid": pid, "tid": tid}


def _counter(name: str, time_us: float, pid: int, values: dict[str, int]) -> _Json:
    return {"name": name, "ph": "C", "ts": round(float(time_us), 3), "pid": pid, "args": values}


def _name(kind: str, pid: int, tid: int, name: str) -> _Json:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
