"""Buckets of state in turn through a few buffers: while one is stepped, the one before is written, the next is read."""

from collections.abc import Callable, Sequence

from memwall.apply.optimizer_state.shares import Share
from memwall.predict.state_on_disk import NUM_BUFFERS
from memwall.store.buckets import BucketBuffer, Entry

__all__ = ["step_through"]


def step_through(
    moving: Sequence[Share],
    step: Callable[[Share], None],
    entries: Callable[[Share], list[Entry]],
    *,
    ring_bytes: int,
) -> None:
    """Steps shares whose state is away, or is made by their step; then it is away again.

    Args:
        step: steps one share, with its state in memory.
        entries: of a share, where its state is after the step.
        ring_bytes: what a buffer of the ring holds. A larger share would make every buffer that large, so it has one of
            its own, before the others.

    Raises:
        StoreError: a transfer failed.
    """
    for share in moving:
        if share.bucket.num_bytes > ring_bytes:
            _step_in_turn([share], step, entries, num_buffers=1)
    ring = [share for share in moving if share.bucket.num_bytes <= ring_bytes]
    _step_in_turn(ring, step, entries, num_buffers=min(NUM_BUFFERS, len(ring)))


def _step_in_turn(
    moving: Sequence[Share],
    step: Callable[[Share], None],
    entries: Callable[[Share], list[Entry]],
    *,
    num_buffers: int,
) -> None:
    num_bytes = max((share.bucket.num_bytes for share in moving), default=0)
    buffers = [moving[0].bucket.new_buffer(num_bytes) if num_bytes else None for _ in range(num_buffers)]
    try:
        for number in range(num_buffers - 1):
            _read_ahead(moving, number, buffers)
        for number, share in enumerate(moving):
            _read_ahead(moving, number + num_buffers - 1, buffers)
            buffer = buffers[number % num_buffers]
            share.bucket.finish_read(buffer)
            try:
                step(share)
            finally:
                share.bucket.put_away(entries(share), buffer)
    finally:
        for share in moving:
            share.bucket.drop_read()
            share.bucket.wait_for_write()


def _read_ahead(moving: Sequence[Share], number: int, buffers: Sequence[BucketBuffer | None]) -> None:
    """Begins to read a bucket, into the buffer from which an earlier one is still written."""
    if number < len(moving):
        buffer = buffers[number % len(buffers)]
        if buffer is not None:
            before = number - len(buffers)
            after = moving[before].bucket.write if before >= 0 else None
            moving[number].bucket.begin_read(buffer, after=after)
