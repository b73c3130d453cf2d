"""Tells what a trace cannot see of these operations: FLOPs, what they allocate for themselves, passes over that.

Recorded on fake tensors a step calls each of them as one operator.
"""

from typing import Any

import torch
from torch import Tensor

from memwall.patches import note_permanent
from memwall.torch_internals.operators import flop_formula_of
from memwall.trace.op_work import OWN_WORK, KernelWork, OwnWork

from .linear_cross_entropy import _ops as _loss_operators  # noqa: F401  (it defines the operators)
from .linear_cross_entropy._chunks import LossCall
from .linear_cross_entropy._cost import chunks_work, losses_work, rounded_bytes, scratch_bytes

_OPS = torch.ops.memwall


def _loss_flops(call: LossCall, num_products: int) -> int:
    return 2 * call.x.shape[0] * call.w.numel() * num_products


def _loss_work(*inputs: Any) -> OwnWork:
    call = LossCall(*inputs)
    return OwnWork(scratch_bytes(call), tuple(chunks_work(call)), _name(call))


def _rows_work(*inputs: Any) -> OwnWork:
    call = LossCall(*inputs)
    return OwnWork(scratch_bytes(call), tuple(losses_work(call)), _name(call))


def _rows_backward_work(grad: Tensor, *inputs: Any) -> OwnWork:
    """Returns that of the operator that also rounds the head's gradient; what it was added up in is no result."""
    call = LossCall(*inputs)
    scratch, (wide, rounded) = scratch_bytes(call), rounded_bytes(call)
    if wide == rounded:
        return OwnWork(scratch, tuple(chunks_work(call)), _name(call))
    parts = (*chunks_work(call), KernelWork(wide + rounded, 0))
    return OwnWork(wide + max(scratch, rounded) - rounded, parts, _name(call))


def _name(call: LossCall) -> str:
    return str(call.x.dtype).removeprefix("torch.")


@flop_formula_of(_OPS.linear_cross_entropy_sum)
def _(*inputs: Any, out_val: Any = None) -> int:
    call = LossCall(*inputs)
    return _loss_flops(call, 1 + call.want_x + call.want_w)


@flop_formula_of(_OPS.linear_cross_entropy_rows)
def _(*inputs: Any, out_val: Any = None) -> int:
    return _loss_flops(LossCall(*inputs), 1)


@flop_formula_of(_OPS.linear_cross_entropy_rows_backward)
def _(grad: Tensor, *inputs: Any, out_val: Any = None) -> int:
    call = LossCall(*inputs)
    return _loss_flops(call, 1 + call.want_x + call.want_w)


OWN_WORK[_OPS.linear_cross_entropy_sum.default] = _loss_work
OWN_WORK[_OPS.linear_cross_entropy_rows.default] = _rows_work
OWN_WORK[_OPS.linear_cross_entropy_rows_backward.default] = _rows_backward_work
note_permanent(
    "registry",
    "the registry of FLOP formulas",
    why="says what memwall's own operators compute",
    reason="the operators exist as long as the process, and nobody else's entry is changed",
)
