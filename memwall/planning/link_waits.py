"""How long a block waits for the link to the next tier, tensor by tensor, as the executor moves them.

Out: a tensor is held until its copy is done; while more than the window is under way, forward waits for the oldest.
Back: what was saved last comes first, beside backward, which waits where it asks for what is not there yet.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from memwall.planning.solver.instance import Leaving, Link
from memwall.predict.call_rules import Moved
from memwall.trace.records import ModuleCall, Step


class OnTheWay(NamedTuple):
    """Describes what of one storage passes the link."""

    link_bytes: int
    left_seconds: float
    """From the begin of the call until it leaves."""
    asked_seconds: float
    """From the begin of the call's backward until that asks for it."""


def passing(step: Step, call: ModuleCall, saved: Sequence[int], moved: Mapping[int, Moved]) -> list[OnTheWay]:
    """Returns what passes the link for a call, in the order in which it leaves.

    Args:
        saved: numbers of the tensors saved in the call; none where what moves is what the call was given.
        moved: by storage what of it moves.
    """
    forward, backward = _passed(step, call.start, call.end), _passed(step, call.backward_start, call.backward_end)
    left: dict[int, float] = {}
    asked: dict[int, float] = {}
    for number in saved:
        save = step.saved[number]
        left.setdefault(save.storage, _at(forward, save.packed - call.start))
        until = _at(backward, save.unpacked - call.backward_start)
        asked[save.storage] = min(asked.get(save.storage, until), until)
    going = ((index, part.link_bytes) for index, part in moved.items() if part.link_bytes)
    return [OnTheWay(nbytes, left.get(index, 0.0), asked.get(index, 0.0)) for index, nbytes in going]


def _passed(step: Step, start: int, end: int) -> list[float]:
    """Returns what has passed before each operation; as the host issues them, where that is slower."""
    passed = accumulate((op.seconds for op in step.ops[start:end]), initial=0.0)
    return [max(seconds, number * step.launch_seconds) for number, seconds in enumerate(passed)]


def _at(passed: Sequence[float], place: int) -> float:
    return passed[min(max(place, 0), len(passed) - 1)]


def leaving(parts: Sequence[OnTheWay], link: Link, granule_bytes: int) -> Leaving:
    """Returns how a block's forward and the link wait for each other while its tensors leave.

    What they wait for is either something of the block itself, or first of all the link: so with a queue of q seconds
    before, each wait is the longer one of two, the one without a queue and q and a constant. Both are tried once.

    Args:
        parts: in the order in which they leave, from the begin of the block's first call.
        granule_bytes: the largest piece of any tensor in the step: what is on its way gives room up piece by piece.
    """
    if not parts:
        return Leaving()
    bytes_per_second = link.write_bytes_per_second
    long_seconds = 1.0 + parts[-1].left_seconds + sum(part.link_bytes for part in parts) / bytes_per_second
    long_seconds += link.window_bytes / bytes_per_second
    wait_seconds, done_seconds = _waits(parts, link, granule_bytes, 0.0)
    wait_behind, done_behind = _waits(parts, link, granule_bytes, long_seconds)
    return Leaving(
        wait_seconds=wait_seconds,
        wait_behind_seconds=min(wait_seconds, wait_behind - long_seconds),
        done_seconds=done_seconds,
        done_behind_seconds=min(done_seconds, done_behind - long_seconds),
    )


def _waits(parts: Sequence[OnTheWay], link: Link, granule_bytes: int, queue_seconds: float) -> tuple[float, float]:
    """Returns how long forward waits in all, and when after its begin the last copy is done."""
    waited, free_at, leaving_bytes = 0.0, queue_seconds, 0
    under_way: deque[tuple[float, int]] = deque()
    for link_bytes, left_seconds in _pieces(parts, link):
        now = left_seconds + waited
        free_at = max(now, free_at) + link_bytes / link.write_bytes_per_second
        under_way.append((free_at, link_bytes))
        leaving_bytes += link_bytes
        # So much of what was on its way before may be left beside this.
        room_bytes = max(0, link.window_bytes - leaving_bytes - granule_bytes)
        until = queue_seconds - room_bytes / link.write_bytes_per_second
        while leaving_bytes > link.window_bytes:
            copied_at, oldest_bytes = under_way.popleft()
            leaving_bytes -= oldest_bytes
            until = max(until, copied_at)
        waited += max(0.0, until - now)
    return waited, free_at


def _pieces(parts: Sequence[OnTheWay], link: Link) -> Iterator[tuple[int, float]]:
    for part in parts:
        most_bytes = piece_bytes(part.link_bytes, link)
        for begin in range(0, part.link_bytes, most_bytes):
            yield min(most_bytes, part.link_bytes - begin), part.left_seconds


def piece_bytes(link_bytes: int, link: Link) -> int:
    """Returns how much of a tensor leaves, and gives room up, at once."""
    return link.piece_bytes if link.piece_bytes and link_bytes > link.window_bytes else link_bytes


def hidden_bytes(parts: Sequence[OnTheWay], link: Link) -> int:
    """Returns the bytes that the link reads beside a backward that begins with it, before that asks for them."""
    read_bytes, needed_bytes = 0, 0.0
    for part in reversed(parts):
        read_bytes += part.link_bytes
        needed_bytes = max(needed_bytes, read_bytes - link.read_bytes_per_second * part.asked_seconds)
    return read_bytes - math.ceil(needed_bytes)
