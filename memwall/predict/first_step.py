"""The needs of a run's first step, which runs before there is a plan: no budget is met that has no room for it."""

import math
from collections.abc import Callable

import msgspec
from msgspec import Struct


class FirstStep(Struct, frozen=True, kw_only=True):
    """The recorded step, as it ran and as it would run under another budget. All in bytes of the process."""

    needed_bytes: int
    """The most that it held as it ran, without free pages, or that planning held."""
    in_memory_bytes: int
    """The most that it would hold with parameters and gradients in memory; 0 where they were."""
    stays_from_bytes: int
    """Smallest budget with which a first step keeps parameters and gradients in memory."""
    before_bytes: int = 0
    """The most that the process held before it, in what the script does there; 0 where that was nothing new."""
    left_out_bytes: int = 0
    """Bytes that it would hold besides, had it run the blocks that it left out."""
    others_bytes: int = 0
    """Parameters of other models that went to disk while they were built, and were there as the step ran."""
    built_from_bytes: int = 0
    """Smallest budget with which these are built in memory, and stay there; 0 where they were."""
    evaluation_batch: int = 0
    """Samples that the script is going to evaluate at once; 0 where that is not known."""
    called_batch: int = 0
    """Samples that its text evaluates at once, by a name that stands for them: a budget that is told has room for that,
    and one without it is not refused."""
    called_growth: float = 1.0
    """Times as large as in the step what of that is which does not grow with the samples, as a graph's edges."""
    evaluates_with_gradients: bool = True
    """Whether gradients are still there then."""
    has_average: bool = False
    """Whether the script has another model of the same form, as an average of weights is: evaluated on its own, that
    may be without the autocast of the steps."""
    kept_bytes: int = 0
    """A copy of the weights that the script is going to keep, which is in the trace; 0 where none is known."""
    kept_at: str = ""
    """The line that keeps it."""

    def least_budget_bytes(self, smallest_bytes: int, *, asked_bytes: int, budget_for: Callable[[int], int]) -> int:
        """The smallest budget that a run can keep to, from its first step on.

        Args:
            smallest_bytes: for which there is a plan.
            asked_bytes: the budget that the recorded step ran under. Has it kept to that, it needs no margin there.
            budget_for: the smallest budget that leaves a forecast of so many bytes its margin.

        >>> first = FirstStep(needed_bytes=300, in_memory_bytes=420, stays_from_bytes=400)
        >>> [first.least_budget_bytes(size, asked_bytes=100, budget_for=lambda held: held + 10) for size in (200, 390)]
        [310, 440]
        >>> first.least_budget_bytes(200, asked_bytes=305, budget_for=lambda held: held + 10)
        305
        >>> sampled = FirstStep(needed_bytes=300, before_bytes=350, in_memory_bytes=0, stays_from_bytes=0)
        >>> sampled.least_budget_bytes(200, asked_bytes=100, budget_for=lambda held: held + 10)
        360
        """
        needed_bytes = max(self.needed_bytes + self.left_out_bytes, self.before_bytes)
        kept_to_bytes = asked_bytes if asked_bytes >= needed_bytes else math.inf
        as_it_ran = max(smallest_bytes, int(min(budget_for(needed_bytes), kept_to_bytes)))
        # The process differs from run to run by about the margin: near the border either may happen.
        if not self.in_memory_bytes or budget_for(as_it_ran) < self.stays_from_bytes:
            return as_it_ran
        # Not measured, but forecast from a step that ran otherwise: it has the error of both.
        return max(as_it_ran, budget_for(budget_for(self.in_memory_bytes)))

    def with_others(self) -> "FirstStep":
        """Returns the same step with other models' parameters in memory, as it runs where they are built there."""
        return msgspec.structs.replace(
            self, needed_bytes=self.needed_bytes + self.others_bytes, others_bytes=0, built_from_bytes=0
        )
