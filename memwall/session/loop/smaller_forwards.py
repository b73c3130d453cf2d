"""Has what left memory in a recorded forward leave it in smaller ones as well.

A plan leaves small saved tensors where they are, and says from which size on they move. What was just above that in the
recorded step is below it in one of a slightly shorter batch: held to the same size, the shorter one would keep whole
blocks in memory that the plan counts on having on disk.
"""

import math
from collections.abc import Collection
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from memwall.planning.planfile import Plan
from memwall.session.live_plan import LivePlan
from memwall.session.loop.longer_batch import Shape, growth_of, input_shape


class SmallerForwards:
    """Compares each forward under a plan with those of the step that the plan was made from."""

    def __init__(self, live: LivePlan) -> None:
        self._live = live
        self._recorded: WeakKeyDictionary[nn.Module, set[Shape]] = WeakKeyDictionary()
        """Holds by model the shapes that it was called with in the last step that was recorded."""

    def recording_begins(self) -> None:
        """Forgets the forwards of an earlier recording."""
        self._recorded.clear()

    def recorded_with(self, model: nn.Module, shape: Shape) -> Collection[Shape]:
        """Returns the shapes that a model was called with in the last step that was recorded, if this is one of them.

        Otherwise the plan is of another step.
        """
        recorded = self._recorded.get(model, set())
        return recorded if shape in recorded else ()

    def begin_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Notes a forward that is recorded, or fits what moves in one under a plan to its size."""
        if not torch.is_grad_enabled():  # which saves nothing
            return
        if self._live.recorded is not None:
            self._recorded.setdefault(model, set()).add(input_shape(args, kwargs))
            return
        applied, plan = self._live.in_effect.applied, self._live.plan
        if applied is not None and applied.engine is not None and plan is not None:
            shape = input_shape(args, kwargs)
            applied.engine.move_from(least_share(shape, _planned_for(plan, self._recorded.get(model))))


def least_share(shape: Shape, recorded: Collection[Shape]) -> float:
    """Returns the least share of its bytes that a tensor of a recorded forward has in a smaller one; 1 in others.

    Of several recorded forwards that were as large, the one that is nearest counts. Tensors are as large as the batch,
    or grow with the square of its length, which may be the first dimension.
    """
    as_large = [
        each for each in recorded if len(each) == len(shape) and 0 not in each and shape and growth_of(shape, each) <= 1
    ]
    return max((_least_share(shape, each) for each in as_large), default=1.0)


def _least_share(shape: Shape, recorded: Shape) -> float:
    first, lengths = shape[0] / recorded[0], math.prod(shape[1:]) / math.prod(recorded[1:])
    return min(1.0, min(first, first**2) * min(lengths, lengths**2))


def _planned_for(plan: Plan, recorded: Collection[Shape] | None) -> Collection[Shape]:
    """Returns the shapes of the forwards that a plan is of: parts of the recorded ones where it divides the batch."""
    if recorded is None:  # by a plan that was given; of several models it tells one's alone
        workload = plan.forecast.workload
        recorded = () if workload is None else (workload.input_shape,)
    parts = plan.micro_batch / max(1, plan.batch_parts[0])
    return recorded if parts <= 1 else {(math.ceil(shape[0] / parts), *shape[1:]) for shape in recorded if shape}
