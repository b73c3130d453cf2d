"""What a trace cannot see of these operations: FLOPs, what they allocate for themselves, passes over that.

Recorded on fake tensors a step calls each of them as one operator. The figures are those of `cost`.
"""

from typing import Any

import torch
from torch import Tensor

from memwall.patches import note_permanent
from memwall.torch_internals.operators import flop_formula_of
from memwall.trace.own_work import OWN_WORK, OwnWork, Part

from .cost import Work
from .linear_cross_entropy import _ops as _loss_operators  # noqa: F401  (it defines the operators)
from .linear_cross_entropy._chunks import LossCall
from .linear_cross_entropy._cost import LossShape, chunks_work, losses_work, rounded_bytes, scratch_bytes
from .norms import _ops as _norm_operators  # noqa: F401
from .norms._cost import NormShape, backward_work, partial_bytes

_OPS = torch.ops.memwall


def _shape(call: LossCall) -> LossShape:
    return LossShape(
        num_rows=call.x.shape[0],
        hidden_size=call.x.shape[1],
        vocabulary_size=call.w.shape[0],
        chunk_rows=call.chunk_rows,
        num_used_rows=call.max_valid_rows,
        wants_input_gradient=call.want_x,
        wants_weight_gradient=call.want_w,
        accum_dtype=call.accum_dtype,
    )


def _loss_flops(call: LossCall, num_products: int) -> int:
    num_rows = call.x.shape[0] if call.max_valid_rows is None else min(call.max_valid_rows, call.x.shape[0])
    return 2 * num_rows * call.w.numel() * num_products


def _loss_work(*inputs: Any) -> OwnWork:
    call = LossCall(*inputs)
    shape, dtype = _shape(call), call.x.dtype
    return OwnWork(scratch_bytes(shape, dtype), _parts(chunks_work(shape, dtype)), _name(dtype))


def _rows_work(*inputs: Any) -> OwnWork:
    call = LossCall(*inputs)
    shape, dtype = _shape(call), call.x.dtype
    return OwnWork(scratch_bytes(shape, dtype), _parts(losses_work(shape, dtype)), _name(dtype))


def _rows_backward_work(grad: Tensor, *inputs: Any) -> OwnWork:
    """The head's gradient is rounded here, and what it was added up in is no result."""
    call = LossCall(*inputs)
    shape, dtype = _shape(call), call.x.dtype
    scratch, (wide, rounded) = scratch_bytes(shape, dtype), rounded_bytes(shape, dtype)
    if wide == rounded:
        return OwnWork(scratch, _parts(chunks_work(shape, dtype)), _name(dtype))
    parts = _parts([*chunks_work(shape, dtype), Work(bytes_moved=wide + rounded)])
    return OwnWork(wide + max(scratch, rounded) - rounded, parts, _name(dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parts(work: list[Work]) -> tuple[Part, ...]:
    return tuple(Part(part.bytes_moved, part.flops) for part in work)


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


def _norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, *terms: Any
) -> OwnWork:
    num_columns = x.shape[-1]
    shape = NormShape(
        num_rows=x.numel() // max(1, num_columns),
        num_columns=num_columns,
        is_layer_norm=mean.numel() > 0,
        adds_residual=grad_sum is not None,
        wants_weight_gradient=weight is not None and terms[-2],
    )
    return OwnWork(partial_bytes(shape), _parts(backward_work(shape, x.dtype)))


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
