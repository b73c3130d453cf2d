"""Tells what a trace cannot see of these operations: FLOPs, what they allocate for themselves, passes over that.

Recorded on fake tensors a step calls each of them as one operator.
"""

from typing import Any

import torch
from torch import Tensor

from memwall.patches import note_permanent
from memwall.torch_internals.operators import flop_formula_of
from memwall.trace.op_work import OWN_WORK, KernelWork, OwnWork

from ._configs import norm_backward_launch, num_row_chunks
from .linear_cross_entropy import _ops as _loss_operators  # noqa: F401  (it defines the operators)
from .linear_cross_entropy._chunks import LossCall
from .linear_cross_entropy._cost import chunks_work, losses_work, rounded_bytes, scratch_bytes
from .norms import _ops as _norm_operators  # noqa: F401

_OPS = torch.ops.memwall
# Of an H100 or H200: only the buffer in which weight gradients meet depends on it.
_NUM_MULTIPROCESSORS = 132


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


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, *terms: Any) -> OwnWork:
    """Returns partial sums for the weight, and the passes over them; a row no program can hold is read twice."""
    num_columns = x.shape[-1]
    num_rows = x.numel() // max(1, num_columns)
    tensor_bytes = x.numel() * x.dtype.itemsize
    row_bytes = num_rows * max(4, x.dtype.itemsize)
    block = norm_backward_launch(num_columns, 32).block
    sums_bytes = 0
    if weight is not None and terms[-1] and num_rows:
        num_chunks = num_row_chunks(num_rows, max(1, -(-num_columns // block)), _NUM_MULTIPROCESSORS)
        sums_bytes = num_chunks * num_columns * 4
    parts = [KernelWork(3 * tensor_bytes + row_bytes + sums_bytes, 0)]
    if num_columns > block:
        parts.append(KernelWork(2 * tensor_bytes + row_bytes, 0))
    if sums_bytes:
        parts.append(KernelWork(sums_bytes, 0))
    return OwnWork(sums_bytes, tuple(parts))


OWN_WORK[_OPS.linear_cross_entropy_sum.default] = _loss_work
OWN_WORK[_OPS.linear_cross_entropy_rows.default] = _rows_work
OWN_WORK[_OPS.linear_cross_entropy_rows_backward.default] = _rows_backward_work
OWN_WORK[_OPS.norm_backward.default] = _norm_backward
note_permanent(
    "registry",
    "the registry of FLOP formulas",
    why="says what memwall's own operators compute",
    reason="the operators exist as long as the process, and nobody else's entry is changed",
)
