"""`linear_cross_entropy` as three custom operators, so that torch.compile sees it whole and fake tensors can run it.

`sum_op` computes gradients in forward, chunk by chunk, and keeps them (gradients of the sum are known up to one
factor); `rows_op` keeps its inputs and computes logits again in backward, where each row's upstream gradient is known.
Gradients are not scaled by 1 / num_items before backward: in fp16 they would underflow.
"""

from typing import Any

import torch
from torch import Tensor

from .._rows import compute_dtype
from ..scaled_copy import scaled_copy
from ._chunks import Gradients, Loss, LossCall, chunked_loss, empty_gradients

__all__ = ["rows_op", "sum_op", "weight_gradient_dtype"]

_NONE_WANTED = (False, False, False)
# The fields of LossCall, as a torch schema.
_CALL = (
    "Tensor x, Tensor w, Tensor target, Tensor? bias, Tensor? token_weight, int ignore_index, float label_smoothing, "
    "float z_loss, float softcap, float logit_scale, SymInt chunk_rows, SymInt? max_valid_rows, "
    "ScalarType accum_dtype, bool want_x, bool want_w, bool want_bias"
)


def weight_gradient_dtype(dtype: torch.dtype, accum_dtype: torch.dtype, num_chunks: int) -> torch.dtype:
    """What the head's gradient is added up in: fp32, unless one chunk of bf16 has nothing to add up.

    In fp16 a single chunk needs fp32 as well: a sum over rows, not yet divided by their number, exceeds 65,504.
    """
    if dtype in (torch.float32, torch.float64) or accum_dtype == dtype:
        return dtype
    return torch.float32 if num_chunks > 1 or dtype == torch.float16 else dtype


@torch.library.custom_op(
    "memwall::linear_cross_entropy_sum",
    mutates_args=(),
    schema=f"({_CALL}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def sum_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sum of the weighted losses, lse of each row, and gradients of the sum for input, weight and bias."""
    call = LossCall(*inputs)
    gradients = _allocate(call)
    found = _run(call, *_used_rows(call), gradients)
    return found.rows.sum(), found.lse, *gradients


@sum_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    call = LossCall(*inputs)
    wide = compute_dtype(call.x.dtype)
    return call.x.new_empty((), dtype=wide), call.x.new_empty(call.x.shape[0], dtype=wide), *_allocate(call)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *gradients = output
    call = LossCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.wanted = call.wanted
    ctx.dtypes = (gradients[0].dtype, call.w.dtype, None if call.bias is None else call.bias.dtype)
    ctx.save_for_backward(*(g for g, is_wanted in zip(gradients, call.wanted, strict=True) if is_wanted))


def _backward_of_sum(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise RuntimeError("linear_cross_entropy can be differentiated once; its gradient has no gradient")
    kept = iter(ctx.saved_tensors)
    return _as_inputs(
        *(
            scaled_copy(next(kept), grad, dtype) if is_wanted and grad is not None else None
            for is_wanted, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
        )
    )


sum_op.register_autograd(_backward_of_sum, setup_context=_setup_sum)


@torch.library.custom_op("memwall::linear_cross_entropy_rows", mutates_args=(), schema=f"({_CALL}) -> (Tensor, Tensor)")
def rows_op(*inputs: Any) -> tuple[Tensor, Tensor]:
    """Weighted loss and lse of each row."""
    call = LossCall(*inputs)
    found = _run(call, *_used_rows(call), empty_gradients(call.x, call.w, _NONE_WANTED, call.w.dtype))
    return found.rows, found.lse


@rows_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor]:
    x = LossCall(*inputs).x
    wide = compute_dtype(x.dtype)
    return x.new_empty(x.shape[0], dtype=wide), x.new_empty(x.shape[0], dtype=wide)


@torch.library.custom_op(
    "memwall::linear_cross_entropy_rows_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def _rows_backward_op(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rows_op` for the upstream gradient of each row."""
    call = LossCall(*inputs)
    gradients = _allocate(call)
    coefficient, rows = _used_rows(call)
    _run(call, coefficient * grad, rows, gradients)
    return _final(call, gradients)


@_rows_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = LossCall(*inputs)
    return _final(call, _allocate(call))


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    call = LossCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[len(call.tensors) :]
    ctx.save_for_backward(*call.tensors)


def _backward_of_rows(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return _as_inputs(None, None, None)
    call = LossCall(*ctx.saved_tensors, *ctx.options)
    gradients = _rows_backward_op(grad, *call)
    return _as_inputs(*(g if is_wanted else None for g, is_wanted in zip(gradients, call.wanted, strict=True)))


rows_op.register_autograd(_backward_of_rows, setup_context=_setup_rows)


def _as_inputs(x: Tensor | None, w: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """One gradient for each argument of an operator."""
    return (x, w, None, bias, *(None,) * (len(LossCall._fields) - 4))


def _run(call: LossCall, coefficient: Tensor, rows: Tensor | None, gradients: Gradients) -> Loss:
    with torch.autocast(call.x.device.type, enabled=False):
        return chunked_loss(call, coefficient, rows, gradients)


def _used_rows(call: LossCall) -> tuple[Tensor, Tensor | None]:
    """Coefficient of each row, and the rows that enter the matmul (None: all of them), found without a host sync."""
    x, target, max_valid_rows = call.x, call.target, call.max_valid_rows
    is_valid = target != call.ignore_index
    coefficient = is_valid.to(compute_dtype(x.dtype))
    if call.token_weight is not None:
        coefficient = coefficient * call.token_weight.detach()
        coefficient = torch.where(is_valid, coefficient, 0.0).to(compute_dtype(x.dtype))
    if max_valid_rows is not None:
        # Rows beyond a bound that was too small would be lost silently; an error would have to wait for the device.
        coefficient = torch.where(is_valid & (is_valid.sum() > max_valid_rows), float("nan"), coefficient)
    if x.device.type == "cpu":
        rows = is_valid.nonzero().squeeze(1)
        return coefficient, None if rows.shape[0] == target.shape[0] else rows[:max_valid_rows]
    if max_valid_rows is None or max_valid_rows >= target.shape[0]:
        return coefficient, None
    # Valid rows first, in order; ignored ones fill up to the bound. Sorting bool is not implemented on every device.
    return coefficient, torch.argsort((~is_valid).to(torch.uint8), stable=True)[:max_valid_rows]


def _allocate(call: LossCall) -> Gradients:
    num_rows = call.x.shape[0] if call.max_valid_rows is None else min(call.x.shape[0], call.max_valid_rows)
    num_chunks = 2 if num_rows > call.chunk_rows else 1
    weight_dtype = weight_gradient_dtype(call.w.dtype, call.accum_dtype, num_chunks)
    return empty_gradients(call.x, call.w, call.wanted, weight_dtype)


def _final(call: LossCall, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the dtypes of what they belong to (the bias has the input's)."""
    return gradients.x, gradients.w.to(call.w.dtype), gradients.bias.to(call.x.dtype)
