"""A sequence of events through the simulated allocator, and the figures that come out.

This is a what-if (L2 of three levels of claim): exact given that the requests do not change, the tie rule of the torch
release, the recorded completion of cross-stream uses, and the capacity. L1, the same settings as in a recording, also
takes the recorded addresses; L3, the edge of a real device's memory, is an interval.
"""

from collections.abc import Collection, Iterable, Iterator

from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_events import (
    ALLOC,
    BEGIN_POOL,
    COMPLETE,
    EMPTY_CACHE,
    END_POOL,
    FINISH,
    FREE,
    RECORD_STREAM,
    Event,
    EventTrace,
    HeldMemory,
)
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.held_memory import load
from memwall.predict.cuda_allocator.memory_blocks import PENDING, Block
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.state import PeakExceeded
from memwall.predict.cuda_allocator.torch_releases import VersionProfile

__all__ = ["Figures", "Playback", "replay"]


class Figures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the allocator did over a sequence of events. All of it is simulated."""

    reserved_peak_bytes: int
    allocated_peak_bytes: int
    active_peak_bytes: int
    requested_peak_bytes: int
    active_at_reserved_peak_bytes: int
    reserved_end_bytes: int
    num_alloc_retries: int
    num_steady_retries: int
    """Retries after the first step."""
    num_device_calls: int
    """Mallocs, frees, maps and unmaps."""
    num_steady_device_calls: int
    """Those after the first step: each costs time in every further step."""
    is_out_of_memory: bool
    """Whether a request failed; the figures then end there."""

    @property
    def fragmentation(self) -> float:
        """Share of reserved memory that was in no block when most was reserved."""
        return 1 - self.active_at_reserved_peak_bytes / max(self.reserved_peak_bytes, 1)

    @property
    def waste_bytes(self) -> int:
        """What rounding and unsplit blocks add to the requests."""
        return self.allocated_peak_bytes - self.requested_peak_bytes


def replay(
    trace: EventTrace,
    settings: AllocatorSettings,
    profile: VersionProfile,
    *,
    capacity_bytes: int | None = None,
    total_bytes: int | None = None,
    limit_bytes: int | None = None,
    addresses: Iterator[int] | None = None,
    empty_cache_at: Collection[str] = (),
    abort_above_bytes: int | None = None,
) -> Figures | None:
    """Figures of a run under these settings, up to the first request that fails.

    Args:
        capacity_bytes: what the device can give to the allocator; None: without end.
        total_bytes: the device's whole memory; default: the capacity.
        limit_bytes: what the process may reserve.
        addresses: where segments are placed; matters only where addresses decide ties.
        empty_cache_at: names of boundaries of the trace at which the cache is emptied.
        abort_above_bytes: reserved memory from which on the result is of no interest.

    Returns:
        None if reserved memory went above `abort_above_bytes`.

    Raises:
        UsageError: a boundary of that name does not exist.
    """
    unknown = set(empty_cache_at) - {name for name, _ in trace.boundaries}
    if unknown:
        known = ", ".join(sorted({name for name, _ in trace.boundaries})) or "none"
        raise UsageError(f"the trace has no phase boundary '{min(unknown)}'; it has {known}")
    device = CudaAllocator(
        settings,
        profile,
        capacity_bytes=capacity_bytes,
        total_bytes=total_bytes,
        limit_bytes=limit_bytes,
        addresses=addresses,
    )
    device.abort_above_bytes = abort_above_bytes
    emptied = {position for name, position in trace.boundaries if name in empty_cache_at}
    stops = sorted(emptied | {0, trace.steady_from, len(trace.events)})
    playback = Playback(device, trace.held)
    warm_retries = warm_calls = 0
    is_complete = True
    try:
        for start, end in zip(stops, stops[1:] + stops[-1:], strict=True):
            if start == trace.steady_from:
                warm_retries, warm_calls = device.num_alloc_retries, device.num_device_alloc + device.num_device_free
            if start in emptied:
                device.empty_cache()
            is_complete = playback.run(trace.events[start:end])
            if not is_complete:
                break
    except PeakExceeded:
        return None
    num_calls = device.num_device_alloc + device.num_device_free
    reached_steady = is_complete or start >= trace.steady_from
    return Figures(
        reserved_peak_bytes=device.reserved_peak_bytes,
        allocated_peak_bytes=device.allocated_peak_bytes,
        active_peak_bytes=device.active_peak_bytes,
        requested_peak_bytes=device.requested_peak_bytes,
        active_at_reserved_peak_bytes=device.active_at_reserved_peak_bytes,
        reserved_end_bytes=device.reserved_bytes,
        num_alloc_retries=device.num_alloc_retries,
        num_steady_retries=device.num_alloc_retries - warm_retries if reached_steady else 0,
        num_device_calls=num_calls,
        num_steady_device_calls=num_calls - warm_calls if reached_steady else 0,
        is_out_of_memory=not is_complete,
    )


class Playback:
    """An allocator and the blocks that events call by number.

    Args:
        device: one that holds nothing yet.
        held: what it holds before the first event; None for nothing.

    Raises:
        UsageError: what is held contradicts itself.
    """

    def __init__(self, device: CudaAllocator, held: HeldMemory | None = None) -> None:
        self.device = device
        self.live: dict[int, Block] = {}
        self._awaited: dict[int, Block] = {}
        for number, block in ({} if held is None else load(device, held)).items():
            (self._awaited if block.state == PENDING else self.live)[number] = block

    def run(self, events: Iterable[Event]) -> bool:
        """Feeds events to the allocator.

        Returns:
            Whether every request was served; if not, the events end at the one that was not.

        Raises:
            UsageError: an event names a block that is not allocated, or has no known action.
        """
        device, live = self.device, self.live
        malloc, free = device.malloc, device.free
        try:
            for action, number, nbytes, stream in events:
                if action == ALLOC:
                    block = malloc(nbytes, stream)
                    if block is None:
                        return False
                    live[number] = block
                elif action == FREE:
                    block = live.pop(number)
                    if block.extra_streams:
                        self._awaited[number] = block
                    free(block)
                elif action == RECORD_STREAM:
                    device.record_stream(live[number], stream)
                elif action == FINISH:
                    device.finish(self._awaited.pop(number))
                elif action == COMPLETE:
                    device.finish(self._awaited.pop(number))
                    device.process_uses()
                elif action == EMPTY_CACHE:
                    device.empty_cache()
                elif action == BEGIN_POOL:
                    if number not in device.private_pools:
                        device.add_pool(number)
                    device.begin_pool(number)
                elif action == END_POOL:
                    device.end_pool()
                else:
                    raise UsageError(f"allocator event has the unknown action {action}")
        except KeyError as missing:
            raise UsageError(f"an allocator event names block {missing.args[0]}, which is not allocated") from None
        return True
