"""A sequence of events through the simulated allocator, and the figures that come out.

This is a what-if (L2 of three levels of claim): exact given that the requests do not change, the tie rule of the torch
release, the recorded completion of cross-stream uses, and the capacity. L1, the same settings as in a recording, also
takes the recorded addresses; L3, the edge of a real device's memory, is an interval.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_events import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    FREE,
    FREE_LATER,
    Event,
    EventTrace,
)
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.held_blocks import Held
from memwall.predict.cuda_allocator.held_memory import load
from memwall.predict.cuda_allocator.memory_blocks import Block
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.torch_releases import VersionProfile


class Figures(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says what the allocator did over a sequence of events. All of it is simulated."""

    reserved_peak_bytes: int
    allocated_peak_bytes: int
    num_steady_device_calls: int
    """Mallocs, frees, maps and unmaps after the first step: each costs time in every further step."""
    is_out_of_memory: bool
    """Whether a request failed; the figures then end there."""


def replay(
    trace: EventTrace,
    settings: AllocatorSettings,
    profile: VersionProfile,
    *,
    total_bytes: int | None = None,
    addresses: Iterator[int] | None = None,
    abort_above_bytes: int | None = None,
) -> Figures:
    """Returns the figures of a run under these settings with memory without end, up to the first impossible request.

    Args:
        total_bytes: the device's whole memory; what is reserved for expandable segments depends on it.
        addresses: where segments are placed; matters only where addresses decide ties.
        abort_above_bytes: reserved memory from which on the result is of no interest.

    Raises:
        PeakExceeded: reserved memory went above `abort_above_bytes`.
    """
    device = CudaAllocator(settings, profile, total_bytes=total_bytes, addresses=addresses)
    device.abort_above_bytes = abort_above_bytes
    playback = Playback(device)
    is_steady = playback.run(trace.events[: trace.steady_from])
    warm_calls = device.num_device_calls
    is_complete = is_steady and playback.run(trace.events[trace.steady_from :])
    return Figures(
        reserved_peak_bytes=device.reserved_peak_bytes,
        allocated_peak_bytes=device.allocated_peak_bytes,
        num_steady_device_calls=device.num_device_calls - warm_calls,
        is_out_of_memory=not is_complete,
    )


class Playback:
    """Feeds events to an allocator, and knows the blocks that events call by number.

    Args:
        device: one that holds nothing yet.
        held: what it holds before the first event; None for nothing.

    Raises:
        UsageError: what is held contradicts itself.
    """

    def __init__(self, device: CudaAllocator, held: Held | None = None) -> None:
        self.device = device
        self.live: dict[int, Block] = {} if held is None else load(device, held)
        """Blocks in use or awaited by another stream."""

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
                    free(live.pop(number))
                elif action == FREE_LATER:
                    free(live[number], is_awaited=True)
                elif action == COMPLETE:
                    block = live.pop(number)
                    if block in device.pending:  # otherwise it was waited for when memory was out
                        device.complete(block)
                elif action == EMPTY_CACHE:
                    device.empty_cache()
                else:
                    raise UsageError(f"allocator event has the unknown action {action}")
        except KeyError as missing:
            raise UsageError(f"an allocator event names block {missing.args[0]}, which is not allocated") from None
        return True
