"""Buckets of state in turn through a few buffers: while one is stepped, the one before is written, the next is read."""

from collections import deque
from collections.abc import Callable, Container, Sequence
from itertools import groupby

from memwall.apply.optimizer_state.shares import Share
from memwall.predict.state_on_disk import NUM_BUFFERS
from memwall.store.buckets import BucketBuffer, Entry, drop_reads

__all__ = ["in_order", "step_through"]


def in_order(shares: Sequence[Share], *, ring_bytes: int, early: Container[Share] = ()) -> list[Share]:
    """Shares as they are stepped: what is larger than a buffer of the ring comes last, or first.

    Args:
        ring_bytes: what a buffer of the ring holds.
        early: those read before the step. A large one of them comes first: it is the most memory to have back.
    """

    def place(share: Share) -> int:
        if share.bucket.num_bytes <= ring_bytes:
            return 1
        return 0 if share in early else 2

    return sorted(shares, key=place)


def step_through(
    moving: Sequence[Share],
    step: Callable[[Share], None],
    entries: Callable[[Share], list[Entry]],
    *,
    ring_bytes: int,
    begun: dict[Share, BucketBuffer] | None = None,
) -> None:
    """Steps shares whose state is away, or is made by their step; then it is away again.

    Args:
        moving: `in_order`.
        step: steps one share, with its state in memory.
        entries: of a share, where its state is after the step.
        ring_bytes: what a buffer of the ring holds. A larger share would make every buffer that large, so it has one of
            its own, and is alone in memory but for what was begun.
        begun: shares whose read was begun before, and into which buffer: of a share of the ring one as large as any
            of the ring needs. Emptied, so that each buffer is freed after its last use.

    Raises:
        StoreError: a transfer failed.
    """
    early = {} if begun is None else begun
    without_gradient = early.keys() - set(moving)
    drop_reads([share.bucket for share in without_gradient])
    for share in without_gradient:
        del early[share]
    try:
        for is_alone, group in groupby(moving, key=lambda share: share.bucket.num_bytes > ring_bytes):
            shares = list(group)
            for turn in [[share] for share in shares] if is_alone else [shares]:
                mine: dict[Share, BucketBuffer | None] = {share: early.pop(share) for share in turn if share in early}
                _step_in_turn(turn, step, entries, mine, num_buffers=1 if is_alone else NUM_BUFFERS)
    finally:
        drop_reads([share.bucket for share in early])  # a step before theirs has failed
        early.clear()


def _step_in_turn(
    moving: Sequence[Share],
    step: Callable[[Share], None],
    entries: Callable[[Share], list[Entry]],
    buffers: dict[Share, BucketBuffer | None],
    *,
    num_buffers: int,
) -> None:
    """Steps shares with the buffers that they have, which it takes, and others up to `num_buffers`."""
    num_bytes = max(share.bucket.num_bytes for share in moving)
    waiting = deque(share for share in moving if share not in buffers)
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
        drop_reads([share.bucket for share in moving])
        for share in moving:
            share.bucket.wait_for_write()
