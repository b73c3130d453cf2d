"""Limits on live bytes to solve for, most first: more of them cost less recomputation, but leave less memory free."""

from collections.abc import Callable, Iterator

# Parts of the room that tensors may fill; what is left is for pages that are free and kept.
_LIVE_SHARES = (1.0, 0.99, 0.98, 0.96, 0.94, 0.9, 0.86, 0.82, 0.77, 0.72, 0.65, 0.55)
_MOST_ROUNDS = 10
# A round that changes less than this mostly finds the same plan again.
_LEAST_STEP = 0.005


class LiveLimits:
    """Yields limits for live bytes, to be gone through once.

    Where page faults cost time, fewer live bytes may be better even where more would fit: then the limits are fixed
    shares of the room. An allocator that is simulated to the byte is solved for, replayed and tightened instead: when
    the replay of a plan has been over, the next limit is lower in the same proportion, since what an allocator loses
    grows with what it holds.

    Args:
        room_bytes: what the allocator may hold.
        least_bytes: asked last: the fewest live bytes that a plan can have.
        is_tightened: whether each limit follows from the replay at the last one.
    """

    def __init__(self, room_bytes: int, least_bytes: Callable[[], int], *, is_tightened: bool) -> None:
        self._room_bytes, self._least_bytes, self._is_tightened = room_bytes, least_bytes, is_tightened
        self._ratio = 1.0

    def over(self, needed_bytes: int) -> None:
        """Notes that the plan for the last limit makes the allocator hold this much, more than there is room for."""
        self._ratio = self._room_bytes / needed_bytes

    def __iter__(self) -> Iterator[int]:
        if self._is_tightened:
            yield from self._tightened()
        else:
            yield from (int(self._room_bytes * share) for share in _LIVE_SHARES)
        yield self._least_bytes()

    def _tightened(self) -> Iterator[int]:
        live_bytes = self._room_bytes
        for _ in range(_MOST_ROUNDS):
            yield live_bytes
            live_bytes = int(live_bytes * min(self._ratio, 1 - _LEAST_STEP))
            self._ratio = 1.0
