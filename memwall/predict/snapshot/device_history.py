"""Replays a snapshot's history: which device memory was held, and which blocks of it were in use, after every event.

The snapshot holds the final state and what led to it, so the state before the first event follows by undoing the events
from the last to the first.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings, read_items, with_option
from memwall.predict.cuda_allocator.held_blocks import Held, Range, UsedBlock
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.snapshot.device_memory import MemoryState, range_of
from memwall.trace.snapshot.records import Event, Snapshot

BEFORE_RECORDING = -1
"""Stack of a block of which only its end was recorded."""


class DeviceHistory(Struct, frozen=True, kw_only=True):
    """Holds one device's history in a form that can be replayed: a start and a plain sequence of events."""

    device: int
    start: Held
    """The memory held and in use before the first event."""
    events: tuple[Event, ...]
    exact_bytes: dict[int, int]
    """Block sizes of those allocations that the snapshot still holds, by index of the event."""
    rules: AllocatorSettings
    """How sizes were rounded, and from which size on blocks were never split."""
    num_unmatched: int
    """Events that contradict the final state; more than a few mean that parts of the history are missing."""


def recording_of(snapshot: Snapshot, device: int) -> DeviceHistory:
    """Returns the history of one device with the state it started from."""
    events = snapshot.traces[device] if device < len(snapshot.traces) else ()
    rules = _rules(snapshot)
    state = MemoryState(_final_state(snapshot, device), rules)
    exact_bytes: dict[int, int] = {}
    for index in range(len(events) - 1, -1, -1):
        _undo(state, events[index], index, exact_bytes)
    return DeviceHistory(
        device=device,
        start=state.held,
        events=events,
        exact_bytes=exact_bytes,
        rules=rules,
        num_unmatched=state.num_unmatched,
    )


def replayed(recording: DeviceHistory) -> Iterator[MemoryState]:
    """Yields one and the same state before the first event and after each."""
    state = MemoryState(recording.start, recording.rules)
    yield state
    for index, event in enumerate(recording.events):
        state.apply(event, recording.exact_bytes.get(index))
        yield state


def held_after(recording: DeviceHistory, positions: Iterable[int]) -> dict[int, Held]:
    """Returns what was held and used after so many events of a recording, for several such numbers in one replay."""
    wanted = set(positions)
    return {number: state.held for number, state in enumerate(replayed(recording)) if number in wanted}


def _undo(state: MemoryState, event: Event, index: int, exact_bytes: dict[int, int]) -> None:
    match event.action:
        case "alloc":
            block = state.remove_block(event.address)
            if block is None:
                state.num_unmatched += 1
            elif block.is_exact:
                exact_bytes[index] = block.num_bytes
        case "free_completed":
            block = UsedBlock(
                address=event.address,
                num_bytes=state.block_bytes(event.address, event.num_bytes),
                requested_bytes=event.num_bytes,
                stack=BEFORE_RECORDING,
                category=event.category,
                # Until the request is undone, too; a history that begins between the two began with a waiting block.
                is_pending=True,
                is_exact=False,
            )
            state.add_block(block)
        case "free_requested":
            block_or_none = state.remove_block(event.address)
            if block_or_none is None:
                state.num_unmatched += 1
            else:
                state.add_block(replace(block_or_none, is_pending=False))
        case "segment_alloc" | "segment_map":
            state.cut_range(event.address, event.num_bytes)
        case "segment_free" | "segment_unmap":
            state.add_range(range_of(event))


def _final_state(snapshot: Snapshot, device: int) -> Held:
    ranges, blocks = [], []
    for segment in snapshot.segments:
        if segment.device != device:
            continue
        held = Range(
            address=segment.address,
            num_bytes=segment.num_bytes,
            stream=segment.stream,
            is_small=segment.kind == "small",
            is_expandable=segment.is_expandable,
        )
        ranges.append(held)
        blocks += [
            UsedBlock(
                address=block.address,
                num_bytes=block.num_bytes,
                requested_bytes=block.requested_bytes,
                stack=block.stack,
                category="",
                is_pending=block.state == "active_pending_free",
                is_exact=True,
            )
            for block in segment.blocks
            if block.state != "inactive"
        ]
    return Held(ranges=tuple(ranges), blocks=tuple(blocks))


def _rules(snapshot: Snapshot) -> AllocatorSettings:
    """Returns `roundup_power2_divisions` and `max_split_size`; neither where the string cannot be read."""
    text = snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF", "")
    profile, _ = profile_for("2.13.0")
    rules = AllocatorSettings()
    try:
        given = dict(read_items(text)).get("roundup_power2_divisions", "0")
        rules = with_option(rules, "roundup_power2_divisions", given, profile)
    except UsageError:
        pass
    # torch writes -1 or the largest integer for none.
    split = snapshot.settings.get("max_split_size", "")
    max_split_bytes = int(split) if split.isdigit() and 0 < int(split) < 1 << 50 else None
    return replace(rules, max_split_bytes=max_split_bytes)
