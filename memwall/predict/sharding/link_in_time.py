"""A pass of units laid out in time, over a link that carries one collective after the other."""

from collections import deque
from collections.abc import Sequence


def waiting_seconds(
    computed: Sequence[float], gathers: Sequence[float], reductions: Sequence[float], num_ahead: int
) -> float:
    """Returns the seconds of a pass in which nothing is computed, for units that wait for the link.

    A unit runs when the one before it has, and when it is gathered. A gather may begin as the unit so many before it
    does, the first ones at once, and a reduction as its unit has ended; what could begin first goes first.

    Args:
        computed: seconds of each unit's operations. gathers, reductions: seconds of its collectives, 0 for none.
    """
    ended = link_free = 0.0
    gathered: list[float] = []
    reducible: deque[tuple[float, float]] = deque()

    def begin_gathers(number: int, now: float) -> float:
        free = link_free
        for seconds in gathers[len(gathered) : number]:
            while reducible and reducible[0][0] <= max(free, now):
                ready, taken = reducible.popleft()
                free = max(free, ready) + taken
            free = max(free, now) + seconds if seconds else free
            gathered.append(free if seconds else now)
        return free

    link_free = begin_gathers(num_ahead, 0.0)
    for number, seconds in enumerate(computed):
        begun = max(ended, gathered[number])
        link_free = begin_gathers(number + 1 + num_ahead, begun)
        ended = begun + seconds
        if reductions[number]:
            reducible.append((ended, reductions[number]))
    for ready, taken in reducible:
        link_free = max(link_free, ready) + taken
    return max(ended, link_free) - sum(computed)
