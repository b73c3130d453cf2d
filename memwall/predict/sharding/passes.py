"""The executions of units in forward and in backward, and what of their collectives no computation hides."""

from collections.abc import Sequence

from memwall.predict.sharding.rank_step import RankStep
from memwall.predict.sharding.units import ShardUnit


class Passes:
    """Holds the executions of units other than the root in the order of forward, and in that of backward."""

    def __init__(self, units: tuple[ShardUnit, ...]) -> None:
        inner = [(unit, call) for unit in units if not unit.is_root for call in unit.calls]
        self._root_end = max((call.end for unit in units if unit.is_root for call in unit.calls), default=0)
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

    def prefetched_at(self, position: int) -> int:
        """Returns when a unit is gathered for backward: as the unit before it in backward begins."""
        return self.backward[position - 1][1].backward_start if position else self._root_backward

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
    ) -> tuple[float, float]:
        """Returns the seconds of all collectives, and what of them is not hidden: one unit's behind another's compute.

        Args:
            at_root: seconds of the root's, which nothing hides.
            gathers: by execution in forward. again: by execution in backward. reductions: by execution in backward.
        """
        total = sum(gathers) + sum(again) + sum(reductions) + at_root
        exposed = at_root + sum(gathers[:1])
        for (_, call), gather in zip(self.forward, gathers[1:], strict=False):
            exposed += max(0.0, gather - rank.seconds(call.start, call.end))
        for position, (_, call) in enumerate(self.backward):
            gather = again[position + 1] if position + 1 < len(again) else 0.0
            reduction = reductions[position - 1] if position else 0.0
            exposed += max(0.0, gather + reduction - rank.seconds(call.backward_start, call.backward_end))
        return total, exposed + sum(again[:1]) + sum(reductions[-1:])
