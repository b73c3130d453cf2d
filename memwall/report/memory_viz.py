"""Writes traces as `torch.cuda.memory._dump_snapshot` does snapshots, for pytorch.org/memory_viz and its kin.

A trace has operations instead of addresses, so each storage gets a place in one made-up expandable segment, the lowest
that is free; its stack is the operation and the modules around it, its category gives the colour. Format: the docstring
of `torch.cuda.memory._snapshot`, and what torch/utils/viz/MemoryViz.js reads of it.
"""

import pickle
from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from memwall.errors import UsageError
from memwall.predict.curve import module_name
from memwall.report.curves import clock_us
from memwall.report.trace_grids import highest_point
from memwall.trace.records import Step, Storage, Trace
from memwall.versioned_files import whole_file

_Json = dict[str, Any]
_BASE = 1 << 40
_ROUND_BYTES = 512
_GRANULE_BYTES = 2 << 20
_UNKNOWN = "unknown"


def save_memory_viz(trace: Trace, path: Path) -> None:
    """Writes a trace as a pickle of plain values.

    Raises:
        UsageError: the trace has no operations, or the file cannot be written.
    """
    found = trace_as_viz(trace)
    with whole_file(path) as file:
        pickle.dump(found, file, protocol=4)


def trace_as_viz(trace: Trace) -> _Json:
    """Returns the step of a trace that has the highest peak, as a snapshot of one device.

    Raises:
        UsageError: no operation was recorded.
    """
    highest = highest_point(trace)
    if highest is None:
        raise UsageError("the trace has no operations, so there is nothing to show over time; record a training step")
    return _Arena(trace, highest.step).snapshot()


class _Arena:
    """Turns one step of a trace into the history of an allocator that never splits, rounds or waits."""

    def __init__(self, trace: Trace, step: Step) -> None:
        self._trace = trace
        self._step = step
        self._events: list[_Json] = []
        # Free stretches by address; the last one has no end.
        self._holes: list[tuple[int, int]] = [(0, 1 << 60)]
        self._places: dict[int, tuple[int, int]] = {}
        self._high_bytes = 0
        self._module_frames: dict[int, list[_Json]] = {}

    def snapshot(self) -> _Json:
        for time_us, index, is_birth in self._order():
            if is_birth:
                self._place(index, time_us)
            else:
                self._free(index, time_us)
        total_bytes = -(-max(self._high_bytes, 1) // _GRANULE_BYTES) * _GRANULE_BYTES
        # MemoryViz.js breaks on a file whose categories lack "unknown" (a misspelt name in annotate_snapshot), so the
        # segment's event has that one.
        opening = self._event("segment_map", _BASE, total_bytes, 0, [], _UNKNOWN)
        return {
            "segments": [self._segment(total_bytes)],
            "device_traces": [[opening, *self._events]],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def _order(self) -> Iterator[tuple[int, int, bool]]:
        """Births and deaths as (time, storage, whether it is a birth), those of one operation deaths first."""
        step, trace = self._step, self._trace
        times_us = clock_us(step).astype(np.int64).tolist()
        changes = []
        for index, storage in enumerate(step.storages):
            birth, death = max(storage.birth, 0), storage.death
            if storage.nbytes and storage.device_type == trace.device and birth < death:
                changes.append((birth, 1, index))
                if death < len(step.ops):
                    changes.append((death, 0, index))
        for operation, is_birth, index in sorted(changes):
            yield times_us[operation], index, bool(is_birth)

    def _place(self, index: int, time_us: int) -> None:
        storage = self._step.storages[index]
        num_bytes = -(-storage.nbytes // _ROUND_BYTES) * _ROUND_BYTES
        hole = next(k for k, (_, room) in enumerate(self._holes) if room >= num_bytes)
        offset, room = self._holes[hole]
        self._holes[hole : hole + 1] = [(offset + num_bytes, room - num_bytes)] if room > num_bytes else []
        self._places[index] = (offset, num_bytes)
        self._high_bytes = max(self._high_bytes, offset + num_bytes)
        self._events.append(self._storage_event("alloc", index, time_us, self._frames(storage)))

    def _free(self, index: int, time_us: int) -> None:
        for action in ("free_requested", "free_completed"):
            self._events.append(self._storage_event(action, index, time_us, []))
        offset, num_bytes = self._places.pop(index)
        insort(self._holes, (offset, num_bytes))
        position = bisect_left(self._holes, (offset, num_bytes))
        for first in (position, position - 1):
            if 0 <= first < len(self._holes) - 1 and sum(self._holes[first]) == self._holes[first + 1][0]:
                merged = (self._holes[first][0], self._holes[first][1] + self._holes[first + 1][1])
                self._holes[first : first + 2] = [merged]

    def _storage_event(self, action: str, index: int, time_us: int, frames: list[_Json]) -> _Json:
        storage = self._step.storages[index]
        return self._event(action, _BASE + self._places[index][0], storage.nbytes, time_us, frames, storage.category)

    def _event(
        self, action: str, address: int, num_bytes: int, time_us: int, frames: list[_Json], category: str
    ) -> _Json:
        return {
            "action": action,
            "addr": address,
            "size": num_bytes,
            "stream": 0,
            "time_us": time_us,
            "pool_id": (0, 0),
            "frames": frames,
            "category": category,
        }

    def _frames(self, storage: Storage) -> list[_Json]:
        """Returns the operation, then the modules around it from the inside out."""
        if storage.birth < 0:
            before = {"filename": "before the step", "line": 0, "name": storage.category}
            return [before, *self._modules(storage.module)]
        op = self._step.ops[storage.birth]
        where = module_name(self._trace, storage.module)
        operation = {"filename": where, "line": storage.birth, "name": self._trace.names[op.name]}
        return [operation, *self._modules(storage.module)]

    def _modules(self, module: int) -> list[_Json]:
        if module < 0:
            return []
        if module not in self._module_frames:
            found = self._trace.modules[module]
            frame = {"filename": found.path or found.class_name, "line": 0, "name": found.class_name}
            self._module_frames[module] = [frame, *self._modules(found.parent)]
        return self._module_frames[module]

    def _segment(self, total_bytes: int) -> _Json:
        blocks: list[_Json] = []
        end = 0
        for index, (offset, num_bytes) in sorted(self._places.items(), key=lambda item: item[1]):
            storage = self._step.storages[index]
            if offset > end:
                blocks.append(_block(_BASE + end, offset - end, 0, "inactive", []))
            frames = self._frames(storage)
            blocks.append(_block(_BASE + offset, num_bytes, storage.nbytes, "active_allocated", frames))
            end = offset + num_bytes
        if total_bytes > end:
            blocks.append(_block(_BASE + end, total_bytes - end, 0, "inactive", []))
        used_bytes = sum(num_bytes for _, num_bytes in self._places.values())
        return {
            "device": 0,
            "address": _BASE,
            "total_size": total_bytes,
            "allocated_size": used_bytes,
            "active_size": used_bytes,
            "requested_size": sum(self._step.storages[index].nbytes for index in self._places),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": True,
            "frames": [],
            "blocks": blocks,
        }


def _block(address: int, num_bytes: int, requested_bytes: int, state: str, frames: list[_Json]) -> _Json:
    return {
        "address": address,
        "size": num_bytes,
        "requested_size": requested_bytes,
        "state": state,
        "frames": frames,
    }
