"""Live bytes to solve for, most first: more of them cost less recomputation, but leave the allocator less room."""

from collections.abc import Callable, Iterator
from typing import Protocol

__all__ = ["LiveBudgets", "Shares", "Tightening"]

# Parts of the room that tensors may fill; what is left is for pages that are free and kept.
_LIVE_SHARES = (1.0, 0.99, 0.98, 0.96, 0.94, 0.9, 0.86, 0.82, 0.77, 0.72, 0.65, 0.55)
_MOST_ROUNDS = 10
# A round that changes less than this mostly finds the same plan again.
_LEAST_STEP = 0.005


class LiveBudgets(Protocol):
    """Budgets for live bytes, to be gone through once.

    Args:
        room_bytes: what the allocator may hold.
        least_bytes: asked last: the fewest live bytes that a plan can have.
    """

    def __init__(self, room_bytes: int, least_bytes: Callable[[], int]) -> None: ...

    def over(self, needed_bytes: int) -> None:
        """The plan for the last budget makes the allocator hold this much, more than there is room for."""

    def __iter__(self) -> Iterator[int]: ...


class Shares(LiveBudgets):
    """Fixed shares of the room: page faults cost time, so fewer live bytes may be better even where more would fit."""

    def __init__(self, room_bytes: int, least_bytes: Callable[[], int]) -> None:
        self._room_bytes, self._least_bytes = room_bytes, least_bytes

    def over(self, needed_bytes: int) -> None:
        """The next share is tried, whatever was needed."""

    def __iter__(self) -> Iterator[int]:
        yield from (int(self._room_bytes * share) for share in _LIVE_SHARES)
        yield self._least_bytes()


class Tightening(LiveBudgets):
    """Solve, replay, tighten by what the replay needed, again: for an allocator that is simulated to the byte.

    The first is all the room there is. When a plan's replay has been over, the next is smaller in the same proportion,
    since what an allocator loses grows with what it holds.
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
