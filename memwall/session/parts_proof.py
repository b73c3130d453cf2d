"""Proves that parts of a batch have the gradient of the whole: of one micro-batch and of its two halves, which fit.

Both are added up in the parameters' own gradients, the whole one with its sign turned, so that what is left is their
difference, and no memory is taken for a second gradient. Buffers and random numbers are put back.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from memwall.apply.applied import AppliedPlan
from memwall.apply.microbatch import MicroBatches, count_terms, num_samples, take
from memwall.apply.streaming.guard import GuardedParameter
from memwall.apply.streaming.stream_units import hooked_parameters
from memwall.checkpoint.training_state import random_states, restore_random_states
from memwall.errors import NotExactError
from memwall.session.step_state import StepState

__all__ = ["ROUNDING_RATIO", "PartsProof"]

ROUNDING_RATIO = 1e-3
"""The most that gradients of the same mathematics differ by in single precision, as a share of their norm."""
_LOW_PRECISION_RATIO = 3e-2
"""The same where arithmetic is in half precision, which a loop does not say of itself."""


class PartsProof:
    """Compares once for each plan.

    Attributes:
        unproven: why parts could not be compared; "" where they were, or there are none.
    """

    def __init__(self) -> None:
        self.unproven = ""
        self._applied: AppliedPlan | None = None

    def knows(self, applied: AppliedPlan | None) -> bool:
        """Returns whether nothing of a plan is left to be compared."""
        return applied is None or applied is self._applied or applied.micro.micro_batch is None

    def before_step(
        self,
        applied: AppliedPlan | None,
        batch: Any,
        loss_of: Callable[[Any], Tensor],
        count: Callable[[Any], int] | None,
    ) -> None:
        """Compares, before the first step under a plan that divides batches.

        Raises:
            NotExactError: the parts have another gradient; none of them is left in the parameters.
        """
        if applied is None or applied is self._applied:
            return
        self._applied, self.unproven = applied, ""
        micro, size = applied.micro, num_samples(batch)
        if micro.micro_batch is None or micro.micro_batch >= size:
            return
        part = take(batch, 0, micro.micro_batch, size)
        self.unproven = _why_not(applied.model, micro.micro_batch)
        if self.unproven:
            return
        counter = count or (lambda some: count_terms(some, is_shifted=micro.shifts_labels))
        state, random = StepState(applied.model), random_states()
        state.take()
        try:
            ratio, draws = _difference(applied.model, micro, part, loss_of, counter)
        finally:
            state.restore()
            restore_random_states(random)
        if draws:
            self.unproven = "its forward draws random numbers, other ones in each part"
        elif ratio > _LOW_PRECISION_RATIO:
            raise NotExactError(
                action=f"dividing the batch into parts of {micro.micro_batch}",
                found=(
                    f"the gradient of {micro.micro_batch} samples is not that of its halves together, it differs by "
                    f"{ratio:.0%}: the loss is no mean over samples, or over as many terms as are counted (give the "
                    "number of terms by `count`, or a budget in which the batch fits undivided)"
                ),
            )
        elif ratio > ROUNDING_RATIO:
            self.unproven = f"the gradients differ by {ratio:.1%}, which rounding in half precision may do"


def _why_not(model: nn.Module, micro_batch: int) -> str:
    """Returns why a part cannot be compared with its halves before the step."""
    if micro_batch < 2:
        return "the parts are of one sample, and more do not fit"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "several ranks train together"
    if any(isinstance(parameter, GuardedParameter) for parameter in model.parameters()):
        return "parameters and gradients leave memory"
    hooked = next((name for name, _ in hooked_parameters(model)), None)
    if hooked is not None:
        return f"a hook runs when the gradient of {hooked} is there"
    if any(bool(gradient.any()) for gradient in _gradients(model)):
        return "gradients from before the step are there"
    return ""


def _difference(
    model: nn.Module,
    micro: MicroBatches,
    part: Any,
    loss_of: Callable[[Any], Tensor],
    counter: Callable[[Any], int],
) -> tuple[float, bool]:
    """Returns by which share of its norm the gradient of a part differs from its halves', and whether they draw."""
    size, total, before = num_samples(part), counter(part), torch.get_rng_state()
    for half in (take(part, 0, size // 2, size), take(part, size // 2, size, size)) if total else ():
        (loss_of(half) * (counter(half) / total)).backward()
    norm = _norm(_gradients(model))
    (-loss_of(part)).backward()
    draws = not torch.equal(before, torch.get_rng_state())
    return (_norm(_gradients(model)) / norm if norm else 0.0), draws


def _gradients(model: nn.Module) -> Iterable[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def _norm(gradients: Iterable[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(gradient.detach(), dtype=torch.float64) for gradient in gradients]
    return float(torch.stack([norm.cpu() for norm in norms]).norm()) if norms else 0.0
