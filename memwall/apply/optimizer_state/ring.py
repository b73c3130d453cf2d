"""Buckets of state in turn through a few buffers: while one is stepped, the one before is written, the next is read."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from memwall.apply.optimizer_state.shares import Share
from memwall.predict.state_on_disk import NUM_BUFFERS
from memwall.store.buckets import BucketBuffer, Entry

__all__ = ["in_order", "step_through"]


def in_order(shares: Sequence[Share], *, ring_bytes: int, ahead_bytes: int = 0) -> list[Share]:
    """Shares as they are stepped: what is larger than a buffer of the ring comes last.

    Args:
        ring_bytes: what a buffer of the ring holds.
        ahead_bytes: what may be read before the step. A large share that fits into it comes first: its read would
            overlap nothing in the step.
    """

    def place(share: Share) -> int:
        if share.bucket.num_bytes <= ring_bytes:
            return 1
        return 0 if share.bucket.num_bytes <= ahead_bytes else 2

    return sorted(shares, key=place)


def step_through(
    moving: Sequence[Share],
    step: Callable[[Share], None],
    entries: Callable[[Share], list[Entry]],
    *,
    ring_bytes: int,
    begun: Mapping[Share, BucketBuffer] | None = None,
) -> None:
    """Steps shares whose state is away, or is made by their step; then it is away again.

    Args:
        moving: `in_order`.
        step: steps one share, with its state in memory.
        entries: of a share, where its state is after the step.
        ring_bytes: what a buffer of the ring holds. A larger share would make every buffer that large, so it has one of
            its own, and is alone in memory but for what was begun.
        begun: shares whose read was begun before, and into which buffer: of a share of the ring one as large as any
            of the ring needs.

    Raises:
        StoreError: a transfer failed.
    """
    early = dict(begun or {})
    for share in early.keys() - set(moving):  # without a gradient after all
        del early[share]
        share.bucket.drop_read()
    try:
        for is_alone, group in groupby(moving, key=lambda share: share.bucket.num_bytes > ring_bytes):
            shares = list(group)
            for turn in [[share] for share in shares] if is_alone else [shares]:
                mine = {share: early.pop(share) for share in turn if share in early}
                _step_in_turn(turn, step, entries, mine, num_buffers=1 if is_alone else NUM_BUFFERS)
    finally:
        for share in early:  # a step before theirs has failed
            share.bucket.drop_read()


def _step_in_turn(
    moving: Sequence[Share],
    step: Callable[[Share], None],
    entries: Callable[[Share], list[Entry]],
    begun: dict[Share, BucketBuffer],
    *,
    num_buffers: int,
) -> None:
    num_bytes = max(share.bucket.num_bytes for share in moving)
    buffers: dict[Share, BucketBuffer | None] = dict(begun)
    waiting = deque(share for share in moving if share not in begun)
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
    finally:
        for share in moving:
            share.bucket.drop_read()
            share.bucket.wait_for_write()
