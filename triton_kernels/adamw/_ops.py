"""`FusedAdamW` as custom operators, so that fake tensors can run it and version counters count."""

import torch
from torch import Tensor

from .._launch import runs_triton
from .._rows import compute_dtype
from ._terms import Moments

__all__ = ["adamw_op", "square_sum_op"]


@torch.library.custom_op("memwall::square_sum", mutates_args=())
def square_sum_op(tensors: list[Tensor]) -> Tensor:
    """The sum of the squares of all elements of dense tensors of one dtype, a scalar in fp64."""
    total = torch.empty((), dtype=torch.float64, device=tensors[0].device)
    if runs_triton(tensors[0]):
        from ._kernel import launch_square_sum

        launch_square_sum(tensors, total)
    else:
        from ._reference import reference_square_sum

        reference_square_sum(tensors, total)
    return total


@square_sum_op.register_fake
def _(tensors: list[Tensor]) -> Tensor:
    return torch.empty((), dtype=torch.float64, device=tensors[0].device)


@torch.library.custom_op(
    "memwall::adamw",
    mutates_args=("params", "exp_avgs", "exp_avg_sqs", "exp_avg_units", "exp_avg_sq_units"),
    schema="(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] exp_avg_units, Tensor(e!)[] exp_avg_sq_units, Tensor scalars, int[] numbers, int? seed) -> ()",
)
def adamw_op(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    exp_avg_units: list[Tensor],
    exp_avg_sq_units: list[Tensor],
    scalars: Tensor,
    numbers: list[int],
    seed: int | None,
) -> None:
    """One step of parameters of one dtype, whose gradients and moments are of one kind each, laid out as they are."""
    moments = Moments(exp_avgs, exp_avg_sqs, exp_avg_units, exp_avg_sq_units)
    scalars = scalars.to(compute_dtype(params[0].dtype))
    if runs_triton(params[0]):
        from ._kernel import launch_adamw

        launch_adamw(params, grads, moments, scalars, numbers, seed)
    else:
        from ._reference import reference_adamw

        reference_adamw(params, grads, moments, scalars, numbers, seed)


@adamw_op.register_fake
def _(*arguments: object) -> None:
    return None
