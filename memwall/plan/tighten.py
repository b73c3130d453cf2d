"""Live bytes to solve for where the allocator is simulated: solve, replay, tighten by what the replay needed, again."""

from collections.abc import Callable, Iterator

__all__ = ["Tightening"]

_MOST_ROUNDS = 10
# A round that changes less than this mostly finds the same plan again.
_LEAST_STEP = 0.005


class Tightening:
    """Budgets for live bytes, most first.

    The first is all the room there is. When a plan's replay has been over, the next is smaller in the same proportion,
    since what an allocator loses grows with what it holds.

    Args:
        room_bytes: what the allocator may hold.
        least_bytes: asked last: the fewest live bytes that a plan can have.
    """

    def __init__(self, room_bytes: int, least_bytes: Callable[[], int]) -> None:
        self._room_bytes, self._least_bytes = room_bytes, least_bytes
        self._live_bytes = room_bytes
        self._ratio = 1.0

    def over(self, needed_bytes: int) -> None:
        """The plan for the last budget makes the allocator hold this much, more than there is room for."""
        self._ratio = self._room_bytes / needed_bytes

    def __iter__(self) -> Iterator[int]:
        for _ in range(_MOST_ROUNDS):
            yield self._live_bytes
            self._live_bytes = int(self._live_bytes * min(self._ratio, 1 - _LEAST_STEP))
            self._ratio = 1.0
        yield self._least_bytes()
