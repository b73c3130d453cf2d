"""What the CPU allocator itself counted during a step: the independent measure that recorders are held against.

PyTorch's profiler hears of every allocation and release that goes through its CPU allocator, including the temporaries
inside an operator that no dispatch mode sees. What bypasses the allocator (MKL's and OpenMP's buffers, malloc's slack,
Python) is not in here.

The allocator does not report the release of memory that it handed out while nobody was profiling. So a step must
release only what it allocated itself, or what a warm step under the same profile did: `warm_steps=1` covers the usual
loop that begins with `zero_grad()`.

Beside the tests that use it: importing it needs pytest's `pythonpath = ["tests/trace"]`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch._C._profiler import _ExtraFields_Allocation, _ProfilerEvent

_MARK = "oracle: measured step"


class MemoryEvent(NamedTuple):
    """One allocation or release."""

    address: int
    signed_bytes: int
    """Bytes as requested, negative for a release."""
    live_bytes: int
    """Live bytes after this event."""
    operators: tuple[str, ...]
    """Operators and named ranges running at the time, outermost first."""


class Count(NamedTuple):
    """A step as the allocator saw it."""

    start_bytes: int
    """Live before the step: `existing` storages, and what warm steps left behind."""
    peak_bytes: int
    peak_event: int
    """Index of the event that reached the peak; -1 if the step never rose above its start."""
    events: tuple[MemoryEvent, ...]

    def born_live_at_peak(self) -> list[MemoryEvent]:
        """Returns the step's own allocations alive at its peak, largest first: what to read when two counts differ."""
        live: dict[int, MemoryEvent] = {}
        for event in self.events[: self.peak_event + 1]:
            live.pop(event.address, None)
            if event.signed_bytes > 0:
                live[event.address] = event
        return sorted(live.values(), key=lambda event: -event.signed_bytes)


def profiler_peak_bytes(step: Callable[[], object], existing: Iterable[Tensor] = (), warm_steps: int = 0) -> int:
    """Returns the true peak of live bytes in CPU tensors over one call of `step`; see `count_allocations`."""
    return count_allocations(step, existing, warm_steps).peak_bytes


def count_allocations(step: Callable[[], object], existing: Iterable[Tensor] = (), warm_steps: int = 0) -> Count:
    """Runs `step` under the profiler and adds up every allocation and release.

    Args:
        step: what to measure; the garbage it leaves behind still counts.
        existing: tensors alive beforehand that shall count (parameters, buffers, optimizer state, batch); each storage
            once.
        warm_steps: calls of `step` under the profiler before the measured one. What they leave behind counts.

    Raises:
        ValueError: `step` released a storage of `existing`, which the allocator does not report.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in existing if tensor.numel()}
    sizes = {address: storage.nbytes() for address, storage in storages.items()}
    watched = {address: ref(storage) for address, storage in storages.items()}
    storages.clear()
    with torch.autograd.profiler.profile(use_cpu=True, profile_memory=True) as profile:
        for _ in range(warm_steps):
            step()
        with torch.profiler.record_function(_MARK):
            step()
    gone = [address for address, storage in watched.items() if storage() is None]
    if gone:
        lost_bytes = sum(sizes[address] for address in gone)
        raise ValueError(
            f"the step released {len(gone)} of {len(watched)} existing storages ({lost_bytes} bytes), which the "
            "allocator does not report: leave them out of existing and pass warm_steps=1"
        )
    assert profile.kineto_results is not None
    return _add_up(profile.kineto_results.experimental_event_tree(), sum(sizes.values()))


def _add_up(tree: list[_ProfilerEvent], existing_bytes: int) -> Count:
    nodes = sorted(_walk(tree), key=lambda node: node.start_time_ns)
    mark = next(node for node in nodes if node.name == _MARK)
    ours: dict[int, int] = {}
    live_bytes = start_bytes = peak_bytes = existing_bytes
    peak_event, events = -1, list[MemoryEvent]()
    for node in nodes:
        if node is mark:
            start_bytes = peak_bytes = live_bytes
        fields = node.typed[1]
        if not isinstance(fields, _ExtraFields_Allocation) or fields.device.type != "cpu":
            continue
        address, signed_bytes = fields.ptr, fields.alloc_size
        if signed_bytes > 0:
            ours[address] = signed_bytes
        elif ours.pop(address, None) != -signed_bytes:
            continue  # left over from an earlier profile of this process: not in start_bytes either
        live_bytes += signed_bytes
        if mark.start_time_ns <= node.start_time_ns <= mark.end_time_ns:
            events.append(MemoryEvent(address, signed_bytes, live_bytes, tuple(_running(node))))
            if live_bytes > peak_bytes:
                peak_bytes, peak_event = live_bytes, len(events) - 1
    return Count(start_bytes, peak_bytes, peak_event, tuple(events))


def _walk(nodes: Iterable[_ProfilerEvent]) -> Iterator[_ProfilerEvent]:
    for node in nodes:
        yield node
        yield from _walk(node.children)


def _running(node: _ProfilerEvent) -> list[str]:
    names = []
    parent = node.parent
    while parent is not None and parent.name != _MARK:
        names.append(parent.name)
        parent = parent.parent
    return names[::-1]


def bytes_by_operator(events: Iterable[MemoryEvent]) -> list[tuple[str, int]]:
    """Returns bytes allocated per innermost operator that is not an allocation itself, largest first."""
    totals = Counter[str]()
    for event in events:
        if event.signed_bytes > 0:
            named = [name for name in event.operators if not name.startswith("aten::empty")]
            totals[named[-1] if named else "(none)"] += event.signed_bytes
    return totals.most_common()
