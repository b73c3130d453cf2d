"""Notices that a process has come to hold more beside its tensors since its plan took effect, before a step passes.

What stays there is what libraries make for batches of another shape, as oneDNN does kernels of convolutions, what
saving loads, and what the script keeps that is no tensor, as observations in arrays of numpy's.
"""

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.machine.meter import return_free_memory
from memwall.planning.planfile import Plan

__all__ = ["BesideTensors"]


class BesideTensors:
    """Compares what is held beside tensors as steps begin with what it was once a step had run under the plan."""

    def __init__(self, allocator: AllocatorHandler) -> None:
        self._allocator = allocator
        self._num_changes = 0
        self._settled_bytes: int | None = None
        self._loose_bytes = 0
        """Counts what malloc keeps of what steps have freed, and would give back: it is no rise, and may come again."""

    def begin_step(self, plan: Plan | None, num_changes: int) -> int:
        """Returns the bytes that have come, where a step that is as foreseen would be left half of its margin; else 0.

        Args:
            num_changes: how often the plan was changed so far.
        """
        budget_bytes = None if plan is None else plan.forecast.budget_bytes
        if plan is None or budget_bytes is None or not self._allocator.is_limited:
            return 0
        if num_changes != self._num_changes:
            self._num_changes, self._settled_bytes, self._loose_bytes = num_changes, None, 0
        half_bytes = plan.forecast.margin_bytes // 2
        least_bytes = max(half_bytes, budget_bytes - plan.forecast.steady_process_bytes - half_bytes)
        settled_bytes, held_bytes = self._settled_bytes, self._allocator.others_bytes
        if settled_bytes is not None and held_bytes - settled_bytes < least_bytes + self._loose_bytes:
            return 0  # as in nearly every step, and quickly found
        return_free_memory(generation=0)
        now_bytes = self._allocator.others_bytes
        come_bytes = 0 if settled_bytes is None else now_bytes - settled_bytes
        if settled_bytes is None or come_bytes >= least_bytes:
            self._settled_bytes = now_bytes
            return come_bytes
        self._loose_bytes = held_bytes - now_bytes
        return 0
