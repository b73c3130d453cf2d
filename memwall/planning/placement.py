"""Where the optimizer's state may be, what that frees and what it costs: alternatives for the search."""

from collections.abc import Sequence

from msgspec import UNSET

from memwall.planning.actions import OptimizerPlacement
from memwall.planning.legality import can_move_optimizer_state, can_step_on_cpu
from memwall.predict.cpu_step import gradient_bytes, pipelined_seconds, staging_bytes
from memwall.predict.state_on_disk import (
    NUM_BUFFERS,
    buffer_sizes,
    movable_state_bytes,
    state_sizes,
    with_state_on_disk,
)
from memwall.trace.records import Machine, Step, Trace

__all__ = [
    "CPU_SECONDS_PER_BYTE",
    "MIN_STATE_BYTES",
    "bucket_choices",
    "cpu_bytes_per_second",
    "cpu_step",
    "optimizer_placements",
    "placed",
    "with_more_resident",
]

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
# Of what is away, the least that is worth another search.
_LEAST_FILLED_SHARE = 1 / 32
# Where the CPU steps, it has all of the state; the counter of a parameter's steps is no larger, and is left out.
_MIN_STEPPED_BYTES = 16
CPU_SECONDS_PER_BYTE = 0.25e-9
"""A worker's checksum, system call and hand-over for each byte read or written, beside the computation on the same
cores: 0.17 s for 671 MB (two cores, torch 2.13, 2026-11-21)."""


def optimizer_placements(trace: Trace, steady: Step, *, capacity_bytes: int) -> tuple[OptimizerPlacement, ...]:
    """Ways to have the state on the next tier: a disk below a CPU's memory, pinned host memory below a device's.

    The one that frees most comes first; there is none where that is not legal or frees nothing.

    Args:
        steady: the step that repeats, as it was recorded.
        capacity_bytes: what the tier may be used for.
    """
    state_bytes = movable_state_bytes(steady, MIN_STATE_BYTES)
    if can_move_optimizer_state(trace, state_bytes, capacity_bytes) is not None:
        return ()
    sizes = state_sizes(steady, MIN_STATE_BYTES)
    tight_bytes, fast_bytes = bucket_choices(sizes)
    choices = [(0.0, tight_bytes), *((share, fast_bytes) for share in _RESIDENT_SHARES)]
    found = []
    for share, bucket_bytes in dict.fromkeys(choices):
        if (1 - share) * state_bytes > sum(buffer_sizes(sizes, bucket_bytes)):
            found.append(_placement(trace, steady, int(state_bytes * share), bucket_bytes))
    return tuple(found)


def with_more_resident(
    trace: Trace, steady: Step, placement: OptimizerPlacement, room_bytes: int
) -> OptimizerPlacement | None:
    """The placement with more state in memory, as much as whole parameters' state fills of `room_bytes`.

    None where that is too little to be worth a try. Some of the state stays away: a plan with all of it in memory is
    another one.
    """
    if placement.stepped_on == "cpu":
        return None
    sizes = state_sizes(steady, MIN_STATE_BYTES)
    at_most_bytes, resident_bytes = min(placement.resident_bytes + room_bytes, sum(sizes) - 1), 0
    # The optimizer's order is not known: as many as fit, the largest first.
    for size in reversed(sizes):
        if resident_bytes + size <= at_most_bytes:
            resident_bytes += size
    if resident_bytes - placement.resident_bytes < _LEAST_FILLED_SHARE * (placement.saved_bytes or 0):
        return None
    return _placement(trace, steady, resident_bytes, placement.bucket_bytes)


def _placement(trace: Trace, steady: Step, resident_bytes: int, bucket_bytes: int) -> OptimizerPlacement:
    away_bytes = movable_state_bytes(steady, MIN_STATE_BYTES) - resident_bytes
    sizes = state_sizes(steady, MIN_STATE_BYTES)
    return OptimizerPlacement(
        tier="disk" if trace.device == "cpu" else "host",
        resident_bytes=resident_bytes,
        bucket_bytes=bucket_bytes,
        min_bytes=MIN_STATE_BYTES,
        saved_bytes=away_bytes,
        cost_seconds=_seconds(trace, steady, sizes, away_bytes, bucket_bytes),
    )


def cpu_step(trace: Trace, steady: Step, *, capacity_bytes: int, allow: tuple[str, ...]) -> OptimizerPlacement | None:
    """All of a device's state in host memory, where the CPU steps it; None where that is not legal.

    Args:
        steady: the step that repeats, as it was recorded.
        capacity_bytes: host memory that may be used.
    """
    state_bytes = movable_state_bytes(steady, _MIN_STEPPED_BYTES)
    held_bytes = state_bytes + staging_bytes(steady, _BUCKET_BYTES)
    if can_step_on_cpu(trace, allow) is not None:
        return None
    if can_move_optimizer_state(trace, state_bytes, capacity_bytes) is not None or held_bytes > capacity_bytes:
        return None
    # A third moment is amsgrad's, which DeepSpeed's kernel does not have.
    has_deepspeed = trace.machine.deepspeed_step_bytes_per_second > 0 and state_bytes <= 2 * gradient_bytes(steady)
    return OptimizerPlacement(
        tier="host",
        resident_bytes=0,
        bucket_bytes=_BUCKET_BYTES,
        min_bytes=_MIN_STEPPED_BYTES,
        stepped_on="cpu",
        engine="deepspeed" if has_deepspeed else UNSET,
        saved_bytes=state_bytes,
        cost_seconds=_cpu_step_seconds(trace, steady, state_bytes, cpu_bytes_per_second(trace.machine, has_deepspeed)),
        exactness="changes-numerics",
    )


def bucket_choices(sizes: Sequence[int]) -> tuple[int, int]:
    """Bucket sizes for parameters with so much state: one for the least memory, one for the least time."""
    largest_bytes, share_bytes = max(sizes, default=0), int(sum(sizes) * _BUFFERED_SHARE / NUM_BUFFERS)
    bucket_bytes = _filled_bytes(sizes, min(max(share_bytes, _MIN_BUCKET_BYTES), _BUCKET_BYTES))
    tight_bytes = max((s for s in sizes if s <= max(largest_bytes // NUM_BUFFERS, bucket_bytes)), default=0)
    fast_bytes = max((s for s in sizes if s <= share_bytes), default=0)
    return max(tight_bytes, bucket_bytes), max(fast_bytes, bucket_bytes)


def _filled_bytes(sizes: Sequence[int], at_most: int) -> int:
    """What whole parameters fill of a bucket so large: a buffer for more would hold nothing."""
    filled_bytes = largest_bytes = 0
    for size in sizes:
        if size <= at_most:
            filled_bytes = filled_bytes + size if filled_bytes + size <= at_most else size
            largest_bytes = max(largest_bytes, filled_bytes)
    return largest_bytes or at_most


def placed(step: Step, placement: OptimizerPlacement) -> Step:
    """The step under a placement."""
    return with_state_on_disk(
        step,
        resident_bytes=placement.resident_bytes,
        bucket_bytes=placement.bucket_bytes,
        min_bytes=placement.min_bytes,
        comes_back=placement.stepped_on != "cpu",
    )


def cpu_bytes_per_second(machine: Machine, with_deepspeed: bool) -> float:
    """What a step on the CPU reads and writes, with DeepSpeed's kernel or with torch's."""
    return machine.deepspeed_step_bytes_per_second if with_deepspeed else machine.cpu_step_bytes_per_second


def _cpu_step_seconds(trace: Trace, steady: Step, state_bytes: int, cpu_bytes_per_second: float) -> float:
    """What a step takes longer on the CPU than with all state on the device.

    Gradients and parameters come down and parameters go up, which share the link, as in `_seconds`. The CPU reads all
    of that and the state, and writes parameters and state, while other buckets pass. The device computes nothing
    meanwhile.
    """
    machine = trace.machine
    state_share = state_bytes / max(1, gradient_bytes(steady))
    # Gradients are made from the last parameter to the first, and parameters stepped from the first to the last.
    sizes = [storage.nbytes for storage in reversed(steady.storages) if storage.category == "gradient"]
    seconds = pipelined_seconds(
        sizes,
        _BUCKET_BYTES,
        down_seconds=2 / machine.disk_write_bytes_per_second,
        up_seconds=1 / machine.disk_read_bytes_per_second,
        cpu_seconds=(3 + 2 * state_share) / cpu_bytes_per_second,
    )
    return max(0.0, seconds - sum(op.seconds for op in steady.ops if op.phase == "optimizer"))


def _seconds(trace: Trace, steady: Step, sizes: Sequence[int], away_bytes: int, bucket_bytes: int) -> float:
    """What a step takes longer than with all state in memory.

    The disk either reads or writes, and so does a link to host memory here: that copies pass each other on it at full
    speed is not counted on. Buckets pass while the optimizer computes, which shares a CPU's cores with the threads that
    move them; the first read and the last write overlap nothing. Larger parameters' state is read, stepped and written
    one after the other.
    """
    machine: Machine = trace.machine
    per_byte = 1 / machine.disk_read_bytes_per_second + 1 / machine.disk_write_bytes_per_second
    computing_seconds = sum(op.seconds for op in steady.ops if op.phase == "optimizer")
    total_bytes = sum(sizes)
    alone_share = sum(size for size in sizes if size > bucket_bytes) / total_bytes
    moving_share = (1 - alone_share) * away_bytes / total_bytes
    disk_seconds = (1 - alone_share) * away_bytes * per_byte
    seconds_per_byte = CPU_SECONDS_PER_BYTE if trace.device == "cpu" else 0.0
    cpu_seconds = 2 * (1 - alone_share) * away_bytes * seconds_per_byte / max(1, trace.num_threads)
    edge_seconds = min(bucket_bytes, (1 - alone_share) * away_bytes) * per_byte
    overlapped_seconds = computing_seconds * moving_share
    ring_seconds = max(disk_seconds, overlapped_seconds + cpu_seconds + edge_seconds) - overlapped_seconds
    return alone_share * away_bytes * per_byte + ring_seconds
