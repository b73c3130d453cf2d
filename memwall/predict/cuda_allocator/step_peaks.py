"""Peaks of a run's steps, as the simulated caching allocator has them."""

from collections.abc import Sequence

import torch
from msgspec import Struct

from memwall.predict.cuda_allocator.allocator_events import EMPTY_CACHE, EventTrace, events_of_steps
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.event_replay import Playback
from memwall.predict.cuda_allocator.held_blocks import Standing
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import VersionProfile, profile_for
from memwall.predict.curve import live_peak_bytes
from memwall.trace.records import Step

NUM_STEADY = 2
"""How often the last step of a run is repeated: what it caches, the second one finds."""

# Sizes of large segments are multiples of this.
_SEGMENT_STEP_BYTES = 2 << 20


class StepPeak(Struct, frozen=True, kw_only=True):
    """Holds the peaks of one step of a run. All simulated."""

    allocated_bytes: int
    """Blocks handed out at once: tensors, rounded up, and remainders too small to be split off."""
    reserved_bytes: int
    """Segments that the caching allocator holds."""


def step_peaks(
    steps: Sequence[Step],
    profile: VersionProfile,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    standing: Standing | None = None,
) -> tuple[StepPeak, ...] | None:
    """Returns the peaks of each step of a run, the last one repeated.

    Args:
        settings: of the allocator; None for torch's defaults.
        capacity_bytes: what a session holds the allocator to; None: without end.
        standing: what the allocator holds before; None for nothing.

    Returns:
        None if a request is out of memory even after the cache has been given back.
    """
    trace = events_of_steps(steps, num_repeats=NUM_STEADY, standing=standing)
    return event_peaks(trace, profile, settings=settings, capacity_bytes=capacity_bytes, is_emptied=True)


def event_peaks(
    trace: EventTrace,
    profile: VersionProfile,
    *,
    settings: AllocatorSettings | None = None,
    capacity_bytes: int | None = None,
    is_emptied: bool = False,
) -> tuple[StepPeak, ...] | None:
    """Returns the same of steps that are events already.

    Args:
        capacity_bytes: what the device can give to the allocator.
        is_emptied: whether a session empties the cache before a step that follows one in which memory was short.
    """
    allocator = CudaAllocator(settings or AllocatorSettings(), profile, capacity_bytes=capacity_bytes)
    playback = Playback(allocator, trace.held)
    peaks, num_retries = [], 0
    ready = _num_events_before(trace)
    if not playback.run(trace.events[:ready]):
        return None
    for begin, end in _spans(trace):
        begin = max(begin, ready)
        if is_emptied and allocator.num_alloc_retries > num_retries:
            num_retries = allocator.num_alloc_retries
            allocator.empty_cache()
        allocator.reserved_peak_bytes = allocator.reserved_bytes
        allocator.allocated_peak_bytes = allocator.allocated_bytes
        if not playback.run(trace.events[begin:end]):
            return None
        peaks.append(
            StepPeak(
                allocated_bytes=allocator.allocated_peak_bytes,
                reserved_bytes=allocator.reserved_peak_bytes,
            )
        )
    return tuple(peaks)


def _num_events_before(trace: EventTrace) -> int:
    """Returns how many events end what is held before the first step: blocks it has no use for, and free segments."""
    if trace.held is None:
        return 0
    return next((number for number, event in enumerate(trace.events, 1) if event[0] == EMPTY_CACHE), 0)


def _spans(trace: EventTrace) -> list[tuple[int, int]]:
    """Returns the events of each step; what is allocated ahead of the first belongs to it."""
    begins = [0, *trace.steps[1:]]
    return list(zip(begins, [*begins[1:], len(trace.events)], strict=True))


def reserved_peak_bytes(
    step: Step, *, capacity_bytes: int | None = None, standing: Standing | None = None
) -> int | None:
    """Returns the most that the allocator of this torch holds in a step which is repeated, with default settings.

    Args:
        capacity_bytes: what it may hold: it gives free segments back before it passes that; None: without end.
        standing: what it holds before; None for nothing.

    Returns:
        None if the step is out of memory even so.
    """
    profile, _ = profile_for(str(torch.__version__))
    peaks = step_peaks((step,), profile, capacity_bytes=capacity_bytes, standing=standing)
    return None if peaks is None else max(peak.reserved_bytes for peak in peaks)


def allocated_peak_bytes(step: Step) -> int:
    """Returns the most that the allocator of this torch hands out at once in a step which is repeated."""
    profile, _ = profile_for(str(torch.__version__))
    peaks = step_peaks((step,), profile)
    assert peaks is not None, "memory without end is never full"
    return max(peak.allocated_bytes for peak in peaks)


def least_reserved_bytes(step: Step, standing: Standing | None = None) -> int:
    """Returns the least that the allocator can do with in a step which is repeated, to one part in a hundred."""
    enough_bytes = reserved_peak_bytes(step, standing=standing)
    assert enough_bytes is not None, "memory without end is never full"
    too_few_bytes = min(live_peak_bytes(step, "cuda"), enough_bytes) - 1
    while enough_bytes - too_few_bytes > max(enough_bytes // 100, _SEGMENT_STEP_BYTES):
        capacity_bytes = (enough_bytes + too_few_bytes) // 2
        held_bytes = reserved_peak_bytes(step, capacity_bytes=capacity_bytes, standing=standing)
        if held_bytes is None or held_bytes > capacity_bytes:  # segments that stay are more than that
            too_few_bytes = capacity_bytes
        else:
            enough_bytes = held_bytes
    return enough_bytes


def segment_bytes_of(sizes: Sequence[int]) -> int:
    """Returns the bytes of segments that tensors of these bytes get, made in turn where nothing lies free."""
    allocator = CudaAllocator(AllocatorSettings(), profile_for(torch.__version__)[0])
    for size in sizes:
        allocator.malloc(size)
    return allocator.reserved_bytes
