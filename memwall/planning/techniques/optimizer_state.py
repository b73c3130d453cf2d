"""Optimizer state on a tier below its parameters between steps: a step goes through it bucket by bucket."""

from collections.abc import Iterator, Sequence
from typing import Literal

from memwall.machine.tiers import Tier
from memwall.planning.action import Action
from memwall.planning.location import Location, can_move_optimizer_state
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import DeepSpeedPart, Technique
from memwall.predict.state_on_disk import (
    CPU_SECONDS_PER_BYTE,
    NUM_BUFFERS,
    buffer_sizes,
    movable_state_bytes,
    staging_bytes,
    state_sizes,
    with_state_on_disk,
)
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes

MIN_STATE_BYTES = 64 << 10
"""Smaller tensors of state stay in memory: a model has many of them, and together they are little."""
# Buckets of this size keep a disk or a link busy; the buffers for them are little memory. Of little state they would be
# all: its buckets are smaller, down to one block of the disk's.
_BUCKET_BYTES = 16 << 20
_MIN_BUCKET_BYTES = 2 << 20
# Where parameters are larger, buffers for them may take this part of the state, so that the disk works meanwhile.
_BUFFERED_SHARE = 1 / 3
# Parts of the state that stay in memory; the first one frees most.
_RESIDENT_SHARES = (0.0, 0.25, 0.5, 0.75)


class OptimizerPlacement(Action, frozen=True, kw_only=True, tag="optimizer-placement"):
    """Keeps the optimizer's state on a lower tier between steps; a step goes through it bucket by bucket."""

    tier: Literal["disk", "host"]
    """"host" is pinned memory, for parameters on CUDA; below it, or below a CPU's memory, is "disk"."""
    resident_bytes: int
    """Bytes of the state that stay in memory all the time."""
    bucket_bytes: int
    """State of so many bytes is read, stepped and written as one; three buckets are in memory during a step."""
    min_bytes: int
    """Smaller tensors of state stay in memory besides."""
    staging_bytes: int = 0
    """Pinned host memory through which state of parameters on CUDA passes on its way to a disk and back."""

    def __post_init__(self) -> None:
        if self.exactness != "bit-exact":
            raise ValueError(f"a step on the device is bit-exact, not {self.exactness}")


class _OptimizerState(Technique[OptimizerPlacement]):
    record = OptimizerPlacement
    order = 20
    step_rank = 1
    uses_tier = True

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        """Returns a disk's below a CPU's memory; below a device's pinned host memory's, and then a disk's."""
        steady = inputs.steady
        state_bytes, sizes = movable_state_bytes(steady, MIN_STATE_BYTES), state_sizes(steady, MIN_STATE_BYTES)
        rooms = [(tier, room_bytes) for tier, room_bytes in _rooms(inputs) if state_bytes <= room_bytes]
        reason = can_move_optimizer_state(inputs.trace, state_bytes, rooms[0][1] if rooms else inputs.capacity_bytes)
        if reason is not None:
            return reason
        if not inputs.settings.can_move_state:
            return ()
        tight_bytes, fast_bytes = bucket_choices(sizes)
        choices = [(0.0, tight_bytes), *((share, fast_bytes) for share in _RESIDENT_SHARES)]
        found = [
            _location(_placement(inputs, tier, int(state_bytes * share), bucket_bytes))
            for tier, _ in rooms
            for share, bucket_bytes in dict.fromkeys(choices)
            if (1 - share) * state_bytes > sum(buffer_sizes(sizes, bucket_bytes))
        ]
        return tuple(one for one in found if one.staging_bytes <= inputs.capacity_bytes)

    def step(self, trace: Trace, step: Step, action: OptimizerPlacement) -> Step:
        return with_state_on_disk(
            step, resident_bytes=action.resident_bytes, bucket_bytes=action.bucket_bytes, min_bytes=action.min_bytes
        )

    def what(self, action: OptimizerPlacement) -> str:
        return f"optimizer state to {action.tier}"

    def where(self, actions: Sequence[OptimizerPlacement]) -> str:
        resident_bytes = actions[0].resident_bytes
        return "between steps" + (f"; {format_bytes(resident_bytes)} stay" if resident_bytes else "")

    def lever(self, action: OptimizerPlacement) -> str:
        return f"optimizer state to {action.tier}"

    def binding(self, trace: Trace, actions: Sequence[OptimizerPlacement]) -> Iterator[str]:
        for action in actions:
            where = "host memory" if action.tier == "host" else "disk"
            state_text = format_bytes(action.saved_bytes or 0)
            through = f", through {format_bytes(action.staging_bytes)} of host memory" if action.staging_bytes else ""
            yield f"{state_text} of optimizer state are read from {where} and written in each step{through}"

    def deepspeed(self, action: OptimizerPlacement) -> DeepSpeedPart:
        return DeepSpeedPart(
            state_tier=action.tier, bucket_bytes=action.bucket_bytes, resident_bytes=action.resident_bytes
        )

    def host_state_bytes(self, action: OptimizerPlacement) -> int:
        return (action.saved_bytes or 0) if action.tier == "host" else 0

    def staged_bytes(self, steady: Step, action: OptimizerPlacement) -> tuple[int, int] | None:
        return (action.staging_bytes, action.saved_bytes or 0) if action.staging_bytes else None


TECHNIQUE = _OptimizerState()


def _rooms(inputs: SearchInputs) -> Iterator[tuple[Tier, int]]:
    """Yields the tiers that state may be on, the nearest one first, each with the bytes that a plan may take there."""
    next_tier, *lower = inputs.trace.machine.tiers or (None,)
    if next_tier is not None:
        yield next_tier, inputs.capacity_bytes
    for tier in lower if inputs.trace.device == "cuda" and not inputs.settings.no_disk else ():
        yield tier, tier.free_bytes


def _location(action: OptimizerPlacement) -> Location:
    state_bytes = action.saved_bytes or 0
    is_below = action.staging_bytes > 0
    return Location(
        actions=(action,),
        away_bytes=0 if is_below else state_bytes,
        staging_bytes=action.staging_bytes,
        lowest_bytes=state_bytes if is_below else 0,
        written_bytes=state_bytes,
        read_bytes=state_bytes,
    )


def _placement(inputs: SearchInputs, tier: Tier, resident_bytes: int, bucket_bytes: int) -> OptimizerPlacement:
    trace, steady = inputs.trace, inputs.steady
    away_bytes = movable_state_bytes(steady, MIN_STATE_BYTES) - resident_bytes
    is_below = tier is not trace.machine.next_tier
    return OptimizerPlacement(
        tier=tier.name,
        resident_bytes=resident_bytes,
        bucket_bytes=bucket_bytes,
        min_bytes=MIN_STATE_BYTES,
        staging_bytes=staging_bytes(state_sizes(steady, MIN_STATE_BYTES), bucket_bytes) if is_below else 0,
        saved_bytes=away_bytes,
        cost_seconds=_seconds(trace, tier, steady, away_bytes, bucket_bytes),
    )


def bucket_choices(sizes: Sequence[int]) -> tuple[int, int]:
    """Returns two bucket sizes for parameters with so much state: for the least memory, and for the least time."""
    largest_bytes, share_bytes = max(sizes, default=0), int(sum(sizes) * _BUFFERED_SHARE / NUM_BUFFERS)
    bucket_bytes = _filled_bytes(sizes, min(max(share_bytes, _MIN_BUCKET_BYTES), _BUCKET_BYTES))
    tight_bytes = max((s for s in sizes if s <= max(largest_bytes // NUM_BUFFERS, bucket_bytes)), default=0)
    fast_bytes = max((s for s in sizes if s <= share_bytes), default=0)
    return max(tight_bytes, bucket_bytes), max(fast_bytes, bucket_bytes)


def _filled_bytes(sizes: Sequence[int], at_most: int) -> int:
    """Returns what whole parameters fill of a bucket so large: a buffer for more would hold nothing."""
    filled_bytes = largest_bytes = 0
    for size in sizes:
        if size <= at_most:
            filled_bytes = filled_bytes + size if filled_bytes + size <= at_most else size
            largest_bytes = max(largest_bytes, filled_bytes)
    return largest_bytes or at_most


def _seconds(trace: Trace, tier: Tier, steady: Step, away_bytes: int, bucket_bytes: int) -> float:
    """Returns how much longer a step takes than with all state in memory.

    The disk either reads or writes, and so does a link to host memory here: that copies pass each other on it at full
    speed is not counted on. Buckets pass while the optimizer computes, which shares a CPU's cores with the threads that
    move them; the first read and the last write overlap nothing. Larger parameters' state is read, stepped and written
    one after the other.

    A device's state on disk passes the link besides, which waits for its steps, and they for it; the disk goes on.
    """
    next_tier, sizes = trace.machine.next_tier, state_sizes(steady, MIN_STATE_BYTES)
    assert next_tier is not None
    per_byte = _seconds_per_byte(tier)
    link_per_byte = 0.0 if tier is next_tier else _seconds_per_byte(next_tier)
    computing_seconds = sum(op.seconds for op in steady.ops if op.phase == "optimizer")
    total_bytes = sum(sizes)
    alone_share = sum(size for size in sizes if size > bucket_bytes) / total_bytes
    moving_share = (1 - alone_share) * away_bytes / total_bytes
    tier_seconds = (1 - alone_share) * away_bytes * per_byte
    seconds_per_byte = CPU_SECONDS_PER_BYTE if trace.device == "cpu" else 0.0
    cpu_seconds = 2 * (1 - alone_share) * away_bytes * seconds_per_byte / max(1, trace.num_threads)
    link_seconds = (1 - alone_share) * away_bytes * link_per_byte
    edge_seconds = min(bucket_bytes, (1 - alone_share) * away_bytes) * per_byte
    overlapped_seconds = computing_seconds * moving_share
    stepping_seconds = overlapped_seconds + cpu_seconds + link_seconds + edge_seconds
    ring_seconds = max(tier_seconds, stepping_seconds) - overlapped_seconds
    return alone_share * away_bytes * (per_byte + link_per_byte) + ring_seconds


def _seconds_per_byte(tier: Tier) -> float:
    """Returns the seconds that a byte takes out and back."""
    return 1 / tier.read_bytes_per_second + 1 / tier.write_bytes_per_second
