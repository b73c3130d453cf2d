"""Steps whose gradients torch.func computes: no hook sees what they save, so no plan makes them smaller.

What they free is returned before the budget is passed. Whether that is enough shows once the first of them is over:
then the run goes on, or is refused with a budget that has room for such steps.
"""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.errors import InfeasibleError
from memwall.machine.meter import process_bytes
from memwall.predict.process import budget_for
from memwall.session.measurements import Measurements
from memwall.torch_internals.autograd import execution_is_transformed
from memwall.units import format_bytes

_NUM_LOOKED_AT = 3
"""Steps after which a run is not refused any more: it has trained for some time, and its end says what it held."""
_LEFT_BYTES = 16 << 20
"""Bytes below the budget at which free pages are returned: a process grows elsewhere, too."""
_NUM_BACKWARDS = 6
"""Backwards of a script that calls no model after which it is not refused any more: a step may have several."""
_COPIES = 2
"""Times the parameters' bytes that a later step may hold beside what the first one did: its gradients, and the
parameters that a loop makes anew while the old ones are there."""


def why_unseen(*, trains_copies: bool) -> tuple[str, str]:
    """Returns why no plan makes a run's steps smaller, and what its script can do.

    Args:
        trains_copies: its optimizers train what the model is called with in place of its parameters. When a block is
            recomputed, or a parameter fetched, that has gone again.
    """
    if trains_copies:
        return (
            "the optimizer trains copies, or torch.func.functional_call calls the model with what is made of its "
            "parameters: no plan makes such steps smaller",
            "train the model's own parameters, and call the model with them",
        )
    return (
        "gradients are computed by torch.func, which allows no hooks on saved tensors: no plan makes such steps "
        "smaller",
        "use loss.backward()",
    )


class UnseenSteps:
    """Looks at each forward of a run in which nothing was recorded yet.

    Args:
        budget_bytes: returns what was asked for.
        allocator: the session's.
        absent_bytes: returns what is on disk of models that were built there, which a larger budget has in memory.
    """

    def __init__(
        self,
        measured: Measurements,
        budget_bytes: Callable[[], int],
        allocator: AllocatorHandler,
        absent_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._measured, self._budget_bytes, self._allocator = measured, budget_bytes, allocator
        self._given: weakref.ref[Tensor] | None = None
        """A parameter as the transform has made it for itself: it is gone when that has returned its gradients."""
        self._absent_bytes = absent_bytes
        self._base_bytes = self._live_bytes = self._num_steps = 0
        self._num_optimizer_steps: int | None = None
        self._num_backwards = self._standing_bytes = 0

    def backward_begins(self, trains: Callable[[], bool] = lambda: True) -> None:
        """Judges a script that has called no model until now, when one of its first backwards begins.

        What it has made since the one before, as an optimizer's state, the next step has as well, and may make anew.

        Args:
            trains: returns whether it may be a training step's; what is taken for a sampler's is not judged.

        Raises:
            InfeasibleError: it has passed the budget.
        """
        if self._measured.meter.device != "cpu" or self._num_backwards > _NUM_BACKWARDS or not trains():
            return
        self.hold_heap()
        self._allocator.trim(generation=0)  # what malloc keeps of tensors from before it held none
        before_bytes, self._standing_bytes = self._standing_bytes, process_bytes()
        self._num_backwards += 1
        if self._num_backwards == 1:
            self._base_bytes = self._standing_bytes
        else:
            self._check(
                _COPIES * max(0, self._standing_bytes - before_bytes),
                "the script computes gradients, and has called no model: no plan makes its steps smaller",
                "make a torch.nn.Module of what it trains, and call it as model(batch)",
                part="first backward",
            )

    def forward_begins(
        self, model: nn.Module, num_optimizer_steps: int | None = None, *, trains_copies: bool = False
    ) -> None:
        """Judges the step before, if there was one and it is over.

        Args:
            num_optimizer_steps: those so far, each of which ends a step, whose gradients may hold many inner ones; None
                where there is no optimizer, and a step is over with its gradients.
            trains_copies: see `why_unseen`.

        Raises:
            InfeasibleError: it has passed the budget.
        """
        is_unseen = torch.is_grad_enabled() and (execution_is_transformed() or trains_copies)
        if not is_unseen or self._measured.meter.device != "cpu":
            return
        self.hold_heap()
        given = next(model.parameters(), None)
        if given is None or isinstance(given, nn.Parameter):
            return  # the gradients are those of something else
        if self._given is None:
            self._base_bytes, self._live_bytes = process_bytes(), self._allocator.live_bytes
        elif not self._is_over(num_optimizer_steps):
            return  # a further forward of the same step
        elif self._num_steps < _NUM_LOOKED_AT:
            self._num_steps += 1
            parameter_bytes = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
            self._judge(parameter_bytes, *why_unseen(trains_copies=trains_copies))
        self._given, self._num_optimizer_steps = weakref.ref(given), num_optimizer_steps

    def _is_over(self, num_optimizer_steps: int | None) -> bool:
        if num_optimizer_steps is None:
            return self._given is not None and self._given() is None
        return num_optimizer_steps != self._num_optimizer_steps

    def hold_heap(self) -> None:
        """Has free pages go back to the system, which malloc keeps: with them a run grows for several steps."""
        budget_bytes = self._budget_bytes()
        if budget_bytes and self._allocator.policy is None:
            self._allocator.apply_tight(max(1, budget_bytes - _LEFT_BYTES))
        self._allocator.hold_limit()

    def _judge(self, parameter_bytes: int, why: str, instead: str) -> None:
        # What the loop holds of a step is there while the next one makes the same: the graph of a gradient, say.
        grown_bytes, self._live_bytes = self._allocator.live_bytes - self._live_bytes, self._allocator.live_bytes
        coming_bytes = max(_COPIES * parameter_bytes, grown_bytes) + self._absent_bytes()
        self._check(coming_bytes, why, instead, f", {format_bytes(parameter_bytes)} parameters")

    def _check(self, coming_bytes: int, why: str, instead: str, more: str = "", *, part: str = "step") -> None:
        budget_bytes, held_bytes = self._budget_bytes(), self._measured.meter.peak_bytes()
        if not 0 < budget_bytes < held_bytes:
            return
        smallest_bytes = budget_for(held_bytes + coming_bytes, self._base_bytes)
        raise InfeasibleError(
            f"the budget of {format_bytes(budget_bytes, rounding='down')} cannot be met: the smallest feasible one is "
            f"{format_bytes(smallest_bytes, rounding='up')}, "
            f"{format_bytes(smallest_bytes - budget_bytes, rounding='up')} more\n"
            f"of that, {format_bytes(self._base_bytes)} are the process before the {part}{more}\n"
            f"{why}\n"
            f"  - {instead}\n"
            "  - halve the batch",
            budget_bytes=budget_bytes,
            smallest_feasible_bytes=smallest_bytes,
        )
