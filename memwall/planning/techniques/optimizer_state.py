"""Optimizer state on the next tier between steps: a step goes through it bucket by bucket."""

from collections.abc import Iterator, Sequence
from typing import Literal

from memwall.planning.action import Action
from memwall.planning.location import Location, can_move_optimizer_state
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.technique import DeepSpeedPart, Technique
from memwall.predict.state_on_disk import (
    CPU_SECONDS_PER_BYTE,
    NUM_BUFFERS,
    buffer_sizes,
    movable_state_bytes,
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
    """Keeps the optimizer's state on the next tier between steps; a step goes through it bucket by bucket."""

    tier: Literal["disk", "host"]
    """"host" is pinned memory, for parameters on CUDA; "disk" is for parameters on a CPU."""
    resident_bytes: int
    """Bytes of the state that stay in memory all the time."""
    bucket_bytes: int
    """State of so many bytes is read, stepped and written as one; three buckets are in memory during a step."""
    min_bytes: int
    """Smaller tensors of state stay in memory besides."""

    def __post_init__(self) -> None:
        if self.exactness != "bit-exact":
            raise ValueError(f"a step on the device is bit-exact, not {self.exactness}")


class _OptimizerState(Technique[OptimizerPlacement]):
    record = OptimizerPlacement
    order = 20
    step_rank = 1
    uses_tier = True

    def locations(self, inputs: SearchInputs, ordinary: tuple[Location, ...] | str) -> tuple[Location, ...] | str:
        """Returns a disk's below a CPU's memory, pinned host memory's below a device's."""
        state_bytes = movable_state_bytes(inputs.steady, MIN_STATE_BYTES)
        reason = can_move_optimizer_state(inputs.trace, state_bytes, inputs.capacity_bytes)
        if reason is not None:
            return reason
        if not inputs.settings.can_move_state:
            return ()
        sizes = state_sizes(inputs.steady, MIN_STATE_BYTES)
        tight_bytes, fast_bytes = bucket_choices(sizes)
        choices = [(0.0, tight_bytes), *((share, fast_bytes) for share in _RESIDENT_SHARES)]
        return tuple(
            _location(_placement(inputs, int(state_bytes * share), bucket_bytes))
            for share, bucket_bytes in dict.fromkeys(choices)
            if (1 - share) * state_bytes > sum(buffer_sizes(sizes, bucket_bytes))
        )

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
            where = "disk" if action.tier == "disk" else "host memory"
            state_text = format_bytes(action.saved_bytes or 0)
            yield f"{state_text} of optimizer state are read from {where} and written in each step"

    def deepspeed(self, action: OptimizerPlacement) -> DeepSpeedPart:
        return DeepSpeedPart(
            state_tier=action.tier, bucket_bytes=action.bucket_bytes, resident_bytes=action.resident_bytes
        )

    def host_state_bytes(self, action: OptimizerPlacement) -> int:
        return (action.saved_bytes or 0) if action.tier == "host" else 0


TECHNIQUE = _OptimizerState()


def _location(action: OptimizerPlacement) -> Location:
    state_bytes = action.saved_bytes or 0
    return Location(actions=(action,), away_bytes=state_bytes, written_bytes=state_bytes, read_bytes=state_bytes)


def _placement(inputs: SearchInputs, resident_bytes: int, bucket_bytes: int) -> OptimizerPlacement:
    away_bytes = movable_state_bytes(inputs.steady, MIN_STATE_BYTES) - resident_bytes
    return OptimizerPlacement(
        tier="disk" if inputs.trace.device == "cpu" else "host",
        resident_bytes=resident_bytes,
        bucket_bytes=bucket_bytes,
        min_bytes=MIN_STATE_BYTES,
        saved_bytes=away_bytes,
        cost_seconds=_seconds(inputs.trace, inputs.steady, away_bytes, bucket_bytes),
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


def _seconds(trace: Trace, steady: Step, away_bytes: int, bucket_bytes: int) -> float:
    """Returns how much longer a step takes than with all state in memory.

    The disk either reads or writes, and so does a link to host memory here: that copies pass each other on it at full
    speed is not counted on. Buckets pass while the optimizer computes, which shares a CPU's cores with the threads that
    move them; the first read and the last write overlap nothing. Larger parameters' state is read, stepped and written
    one after the other.
    """
    tier, sizes = trace.machine.next_tier, state_sizes(steady, MIN_STATE_BYTES)
    assert tier is not None
    per_byte = 1 / tier.read_bytes_per_second + 1 / tier.write_bytes_per_second
    computing_seconds = sum(op.seconds for op in steady.ops if op.phase == "optimizer")
    total_bytes = sum(sizes)
    alone_share = sum(size for size in sizes if size > bucket_bytes) / total_bytes
    moving_share = (1 - alone_share) * away_bytes / total_bytes
    tier_seconds = (1 - alone_share) * away_bytes * per_byte
    seconds_per_byte = CPU_SECONDS_PER_BYTE if trace.device == "cpu" else 0.0
    cpu_seconds = 2 * (1 - alone_share) * away_bytes * seconds_per_byte / max(1, trace.num_threads)
    edge_seconds = min(bucket_bytes, (1 - alone_share) * away_bytes) * per_byte
    overlapped_seconds = computing_seconds * moving_share
    ring_seconds = max(tier_seconds, overlapped_seconds + cpu_seconds + edge_seconds) - overlapped_seconds
    return alone_share * away_bytes * per_byte + ring_seconds
