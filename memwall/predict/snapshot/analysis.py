"""A snapshot's words on the peak: who held it, by line and by category, and what fragmentation took.

Blocks are put together by the user's line: the innermost frame of a stack that belongs neither to torch nor to Python
itself. Nothing is guessed: without a stack or a category a block says so.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from memwall.predict.cuda_allocator.held_blocks import Held, Range, UsedBlock
from memwall.predict.curve import Share
from memwall.predict.snapshot.device_history import (
    BEFORE_RECORDING,
    DeviceHistory,
    held_after,
    recording_of,
)
from memwall.predict.snapshot.timeline import Fragmentation, Timeline, timeline_of
from memwall.predict.snapshot.user_line import line_of
from memwall.trace.snapshot.records import Snapshot

EARLIER = "(allocated before the recording)"
_UNKNOWN = "unknown"
_MOST_PINS = 10


class Moment(Struct, frozen=True, kw_only=True):
    """Says how the memory was used after so many events."""

    name: str
    position: int
    fragmentation: Fragmentation
    largest_free_bytes: int
    """The largest free piece in one stretch: what could be handed out without asking the device."""


class OutOfMemory(Struct, frozen=True, kw_only=True):
    """Describes one failed allocation."""

    position: int
    requested_bytes: int
    device_free_bytes: int
    fragmentation: Fragmentation


class Pin(Struct, frozen=True, kw_only=True):
    """Describes a segment at the peak that could not be returned because of a few blocks in it."""

    address: int
    num_bytes: int
    used_bytes: int
    num_blocks: int
    line: str
    """Whose block is the largest in it."""

    @property
    def free_bytes(self) -> int:
        """Returns the bytes that lie unused in it."""
        return self.num_bytes - self.used_bytes


class DeviceAnalysis(Struct, frozen=True, kw_only=True):
    """Holds the figures of one device of a snapshot."""

    device: int
    num_events: int
    peak: Moment
    """Moment at which most bytes were in use."""
    reserved_peak: Moment
    final: Moment
    by_line: tuple[Share, ...]
    """Bytes of blocks in use at the peak, largest first."""
    by_category: tuple[Share, ...]
    pins: tuple[Pin, ...]
    """Segments that are partly in use at the reserved peak, most free bytes first; at most ten."""
    num_pinned: int
    """How many such segments there are."""
    out_of_memory: tuple[OutOfMemory, ...]
    earlier_bytes: int
    """Bytes in the peak of blocks that were there before the recording began."""
    notes: tuple[str, ...]
    """Sentences that the reader of the figures must know."""


def devices_of(snapshot: Snapshot) -> tuple[int, ...]:
    """Returns the devices with memory or a history, the one that holds most first."""
    held: dict[int, int] = {device: 0 for device, events in enumerate(snapshot.traces) if events}
    for segment in snapshot.segments:
        held[segment.device] = held.get(segment.device, 0) + segment.num_bytes
    return tuple(sorted(held, key=lambda device: (-held[device], device)))


def analyse_device(snapshot: Snapshot, device: int) -> tuple[DeviceAnalysis, Timeline]:
    """Replays the history of one device and explains its peaks."""
    recording = recording_of(snapshot, device)
    timeline = timeline_of(recording)
    peak, reserved_peak, end = timeline.active_peak, timeline.reserved_peak, len(recording.events)
    held = held_after(recording, (peak, reserved_peak, end))
    pins = _pins(snapshot, held[reserved_peak])
    blocks = held[peak].blocks
    analysis = DeviceAnalysis(
        device=device,
        num_events=len(recording.events),
        peak=_moment("most in use", timeline, peak, held[peak]),
        reserved_peak=_moment("most held", timeline, reserved_peak, held[reserved_peak]),
        final=_moment("at the end", timeline, end, held[end]),
        by_line=_shares((_owner(snapshot, block), block.num_bytes) for block in blocks),
        by_category=_shares((block.category or _UNKNOWN, block.num_bytes) for block in blocks),
        pins=tuple(pins[:_MOST_PINS]),
        num_pinned=len(pins),
        out_of_memory=_out_of_memory(recording, timeline),
        earlier_bytes=sum(block.num_bytes for block in blocks if block.stack == BEFORE_RECORDING),
        notes=_notes(snapshot, recording, timeline),
    )
    return analysis, timeline


def _owner(snapshot: Snapshot, block: UsedBlock) -> str:
    return EARLIER if block.stack == BEFORE_RECORDING else line_of(snapshot.stacks[block.stack])


def _moment(name: str, timeline: Timeline, position: int, held: Held) -> Moment:
    free = [hole_bytes for piece in held.ranges for hole_bytes in _holes(piece, held.blocks)]
    return Moment(
        name=name,
        position=position,
        fragmentation=timeline.fragmentation(position),
        largest_free_bytes=max(free, default=0),
    )


def _inside(held: Range, blocks: Sequence[UsedBlock]) -> Sequence[UsedBlock]:
    first, last = (
        bisect_left(blocks, address, key=lambda block: block.address) for address in (held.address, held.end)
    )
    return blocks[first:last]


def _holes(held: Range, blocks: Sequence[UsedBlock]) -> list[int]:
    edges = [held.address]
    for block in _inside(held, blocks):
        edges += [block.address, block.address + block.num_bytes]
    edges.append(held.end)
    return [stop - start for start, stop in list(pairwise(edges))[::2]]


def _pins(snapshot: Snapshot, moment: Held) -> list[Pin]:
    blocks = moment.blocks
    pins = []
    for held in moment.ranges:
        inside = _inside(held, blocks)
        used_bytes = sum(block.num_bytes for block in inside)
        if held.is_expandable or not 0 < used_bytes < held.num_bytes:
            continue
        largest = max(inside, key=lambda block: (block.num_bytes, -block.address))
        pins.append(
            Pin(
                address=held.address,
                num_bytes=held.num_bytes,
                used_bytes=used_bytes,
                num_blocks=len(inside),
                line=_owner(snapshot, largest),
            )
        )
    return sorted(pins, key=lambda pin: (-pin.free_bytes, pin.address))


def _out_of_memory(recording: DeviceHistory, timeline: Timeline) -> tuple[OutOfMemory, ...]:
    return tuple(
        OutOfMemory(
            position=index,
            requested_bytes=event.num_bytes,
            device_free_bytes=event.device_free_bytes,
            fragmentation=timeline.fragmentation(index),
        )
        for index, event in enumerate(recording.events)
        if event.action == "oom"
    )


def _notes(snapshot: Snapshot, recording: DeviceHistory, timeline: Timeline) -> tuple[str, ...]:
    notes = []
    if not recording.events:
        notes.append(
            "no history was recorded, so the state at the end stands for the peak; call "
            "torch.cuda.memory._record_memory_history() before the model is built"
        )
    num_earlier = sum(block.stack == BEFORE_RECORDING for block in recording.start.blocks)
    if num_earlier:
        notes.append(
            f"the recording began in the middle of the run: {num_earlier} blocks were there before it and have no stack"
        )
    if timeline.num_unmatched:
        notes.append(
            f"{timeline.num_unmatched} events do not fit the state they meet; parts of the history are missing"
        )
    if any(event.pool != (0, 0) for event in recording.events):
        notes.append("some memory belongs to private pools (CUDA graphs, MemPool), which share nothing")
    if re.search(r":[1-9]", snapshot.settings.get("roundup_power2_divisions", "")):
        notes.append("sizes were rounded up by roundup_power2_divisions; blocks that are gone count without it")
    if snapshot.unknown_actions:
        notes.append(f"events left out because this memwall does not know them: {', '.join(snapshot.unknown_actions)}")
    return tuple(notes)


def _shares(held: Iterable[tuple[str, int]]) -> tuple[Share, ...]:
    totals: dict[str, int] = {}
    for name, num_bytes in held:
        totals[name] = totals.get(name, 0) + num_bytes
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Share(name=name, num_bytes=num_bytes) for name, num_bytes in ordered)
