"""Buckets of state in turn through a few buffers: while one is stepped, the one before is written, the next is read."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby

from memwall.apply.optimizer_state.shares import StateShare
from memwall.predict.state_on_disk import NUM_BUFFERS
from memwall.store.buckets import BucketBuffer, Entry, drop_reads


def in_order(shares: Sequence[StateShare], *, ring_bytes: int) -> list[StateShare]:
    """Shares as they are stepped: what is larger than a buffer of the ring comes last.

    Args:
        ring_bytes: what a buffer of the ring holds.
    """
    return sorted(shares, key=lambda share: share.bucket.num_bytes > ring_bytes)


def step_through(
    moving: Sequence[StateShare],
    step: Callable[[StateShare], None],
    entries: Callable[[StateShare], list[Entry]],
    *,
    ring_bytes: int,
) -> None:
    """Steps shares whose state is away, or is made by their step; then it is away again.

    Args:
        moving: `in_order`.
        step: steps one share, with its state in memory.
        entries: of a share, where its state is after the step.
        ring_bytes: what a buffer of the ring holds. A larger share would make every buffer that large, so it has one of
            its own, and is alone in memory.

    Raises:
        StoreError: a transfer failed.
    """
    for is_alone, group in groupby(moving, key=lambda share: share.bucket.num_bytes > ring_bytes):
        shares = list(group)
        for turn in [[share] for share in shares] if is_alone else [shares]:
            _step_in_turn(turn, step, entries, num_buffers=1 if is_alone else NUM_BUFFERS)


def _step_in_turn(
    moving: Sequence[StateShare],
    step: Callable[[StateShare], None],
    entries: Callable[[StateShare], list[Entry]],
    *,
    num_buffers: int,
) -> None:
    """Steps shares through so many buffers."""
    num_bytes = max(share.bucket.num_bytes for share in moving)
    buffers: dict[StateShare, BucketBuffer | None] = {}
    waiting = deque(moving)
    # A buffer is not freed before the writes from it are waited for: on a device, whoever got its memory next would
    # write there while the copy out, on a stream of its own, still reads.
    spent: list[BucketBuffer | None] = []
    try:
        while waiting and len(buffers) < num_buffers:
            share = waiting.popleft()
            buffers[share] = buffer = share.bucket.new_buffer(num_bytes) if num_bytes else None
            if buffer is not None:
                share.bucket.begin_read(buffer)
        for share in moving:
            buffer = buffers.pop(share)
            share.bucket.finish_read(buffer)
            try:
                step(share)
            finally:
                share.bucket.put_away(entries(share), buffer)
            if waiting:
                later = waiting.popleft()
                buffers[later] = buffer
                if buffer is not None:
                    later.bucket.begin_read(buffer, after=share.bucket.write)
            else:
                spent.append(buffer)
    finally:
        drop_reads([share.bucket for share in moving])
        for share in moving:
            share.bucket.wait_for_write()
