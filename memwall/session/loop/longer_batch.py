"""Tells before a step whether its batch is too large for a plan that was made from a smaller one's step."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from memwall.apply.microbatch import tensors_in
from memwall.planning.planfile import Plan
from memwall.trace.operator_arguments import batch_shape
from memwall.trace.records import Trace

Shape = tuple[int, ...]
"""Says how large a batch is: the shape of the first tensor that a model is called with, or of what a list of them is
padded to; () where there is none."""


def input_shape(args: Any, kwargs: Any) -> Shape:
    """Returns how large a batch is, from a model's arguments, as a recorded step has it."""
    if args and type(args[0]) is Tensor and args[0].dim() > 0:  # as nearly always, and quickly found
        return tuple(args[0].shape)
    return batch_shape((*args, *kwargs.values()))


def batch_shapes(*values: Any) -> tuple[Shape, ...]:
    """Returns the shapes of all tensors in a model's arguments; () where something there may hold others, unseen."""
    if not all(map(_is_open, values)):
        return ()
    return tuple(tuple(tensor.shape) for tensor in tensors_in(values) if tensor.dim() > 0)


def _is_open(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return all(map(_is_open, value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, (Tensor, bool, int, float, str))


def growth_of(shape: Shape, recorded: Shape) -> float:
    """Returns the most by which a step's bytes grow with its batch, or the least by which they shrink."""
    lengths = math.prod(shape[1:]) / math.prod(recorded[1:])
    return shape[0] / recorded[0] * max(lengths, lengths**2)


def is_too_large(shape: Shape, trace: Trace | None, plan: Plan | None, recorded: Collection[Shape] = ()) -> bool:
    """Returns whether a step with such a batch may pass the budget of a plan for the recorded one.

    What a step holds grows with the samples, and with their length squared where each position looks at all others.
    Half of the plan's margin is left, for what steps differ by anyway.

    Args:
        recorded: the shapes of all forwards of the recorded step, of which the trace tells the first one's.
    """
    if trace is None or plan is None or shape == trace.input_shape:
        return False  # as nearly always, and quickly found
    nearest = _nearest(shape, (trace.input_shape, *recorded))
    if not plan.forecast.budget_bytes or nearest is None:
        return False
    budget_bytes = plan.forecast.budget_bytes - plan.forecast.margin_bytes // 2
    growth = growth_of(shape, nearest)
    held_bytes = plan.forecast.steady_process_bytes
    passing_bytes = max(0, held_bytes - trace.base_bytes)
    if growth <= 1.0 or held_bytes + (growth - 1.0) * passing_bytes <= budget_bytes:
        return False
    standing_bytes = sum(s.nbytes for s in trace.steps[0].storages if s.category in ("parameter", "buffer"))
    return held_bytes + (growth - 1.0) * max(0, passing_bytes - standing_bytes) > budget_bytes


def is_tight(plan: Plan) -> bool:
    """Returns whether no other plan needs clearly less: then none has room for a larger batch."""
    forecast = plan.forecast
    least_bytes = (forecast.smallest_feasible_budget_bytes or 0) + forecast.margin_bytes // 2
    return forecast.budget_bytes is not None and least_bytes > forecast.budget_bytes


def _nearest(shape: Shape, recorded: Collection[Shape]) -> Shape | None:
    """Returns that of the shapes from which another one grows least; None where none is to be compared with it."""
    alike = [one for one in recorded if one and len(one) == len(shape) and 0 not in one]
    return min(alike, key=lambda one: growth_of(shape, one), default=None)
