"""The executions of units in forward and in backward, and what of their collectives no computation hides."""

from collections import deque
from collections.abc import Sequence

from memwall.predict.sharding.rank_step import RankStep
from memwall.predict.sharding.units import ShardUnit


class Passes:
    """Holds the executions of units other than the root in the order of forward, and in that of backward."""

    def __init__(self, units: tuple[ShardUnit, ...]) -> None:
        inner = [(unit, call) for unit in units if not unit.is_root for call in unit.calls]
        self._root_end = max((call.end for unit in units if unit.is_root for call in unit.calls), default=0)
        self._root_start = min((call.start for unit in units if unit.is_root for call in unit.calls), default=0)
        starts = [call.backward_start for unit in units if unit.is_root for call in unit.calls]
        self._root_backward = min((start for start in starts if start >= 0), default=0)
        self.forward = sorted(inner, key=lambda found: found[1].start)
        trained = [found for found in inner if found[1].backward_start >= 0]
        self.backward = sorted(trained, key=lambda found: found[1].backward_start)

    def start_after(self, position: int) -> int:
        """Returns when the next unit is gathered in forward."""
        if position + 1 < len(self.forward):
            return self.forward[position + 1][1].start
        return max(self._root_end, self.forward[position][1].end)

    def sent_for_at(self, position: int, num_ahead: int) -> int:
        """Returns when a unit's gather for forward is begun: as it begins itself, or further ahead as one before it."""
        if num_ahead == 1:
            return self.forward[position][1].start
        return self.forward[position - num_ahead][1].start if position >= num_ahead else self._root_start

    def prefetched_at(self, position: int, num_ahead: int) -> int:
        """Returns when a unit is gathered for backward: as the unit so many before it in backward begins."""
        if position < num_ahead:
            return self._root_backward
        return self.backward[position - num_ahead][1].backward_start

    def reduced_after(self, position: int) -> int:
        """Returns when the next unit reduces its gradients."""
        later = self.backward[position + 1 :]
        return later[0][1].backward_end - 1 if later else self.backward[position][1].backward_end

    def is_last_of(self, unit: ShardUnit, position: int) -> bool:
        """Tells whether a unit has no further backward in the step."""
        return all(other.path != unit.path for other, _ in self.backward[position + 1 :])

    def exposed(
        self,
        rank: RankStep,
        *,
        at_root: float,
        gathers: Sequence[float],
        again: Sequence[float],
        reductions: Sequence[float],
        num_ahead: int = 1,
    ) -> tuple[float, float]:
        """Returns the seconds of all collectives, and what of them is not hidden: one unit's behind others' compute.

        Args:
            at_root: seconds of the root's, which nothing hides.
            gathers: by execution in forward. again: by execution in backward. reductions: by execution in backward.
            num_ahead: units between one whose gather is begun and the one that begins then.
        """
        total = sum(gathers) + sum(again) + sum(reductions) + at_root
        forward = [rank.seconds(call.start, call.end) for _, call in self.forward]
        backward = [rank.seconds(call.backward_start, call.backward_end) for _, call in self.backward]
        exposed = waiting_seconds(forward, gathers, [0.0] * len(gathers), num_ahead)
        return total, at_root + exposed + waiting_seconds(backward, again, reductions, num_ahead)


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
