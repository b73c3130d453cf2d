"""`linear_cross_entropy` as three custom operators, so that torch.compile sees it whole and fake tensors can run it.

`_sum` computes gradients in forward, chunk by chunk, and keeps them (gradients of the sum are known up to one factor);
`_rows` keeps its inputs and computes logits again in backward, where each row's upstream gradient is known.
Gradients are not scaled by 1 / num_items before backward: in fp16 they would underflow.
"""

from typing import Any

import torch
from torch import Tensor

from ._linear_cross_entropy_chunks import Gradients, chunked_loss, compute_dtype, empty_gradients
from ._linear_cross_entropy_reference import LossTerms
from .scaled_copy import scaled_copy

__all__ = ["rows_op", "sum_op", "weight_gradient_dtype"]

_NONE_WANTED = (False, False, False)


def weight_gradient_dtype(dtype: torch.dtype, accum_dtype: torch.dtype, num_chunks: int) -> torch.dtype:
    """What the head's gradient is added up in: fp32, unless one chunk of bf16 has nothing to add up.

    In fp16 a single chunk needs fp32 as well: a sum over rows, not yet divided by their number, exceeds 65,504.
    """
    if dtype in (torch.float32, torch.float64) or accum_dtype == dtype:
        return dtype
    return torch.float32 if num_chunks > 1 or dtype == torch.float16 else dtype


@torch.library.custom_op("memwall::linear_cross_entropy_sum", mutates_args=())
def sum_op(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    chunk_rows: int,
    max_valid_rows: int | None,
    accum_dtype: torch.dtype,
    want_x: bool,
    want_w: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sum of the weighted losses, lse of each row, and gradients of the sum for input, weight and bias."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    coefficient, rows = _used_rows(x, target, token_weight, ignore_index, max_valid_rows)
    gradients = _allocate(x, w, chunk_rows, max_valid_rows, accum_dtype, (want_x, want_w, want_bias))
    with torch.autocast(x.device.type, enabled=False):
        found = chunked_loss(
            x, w, target, bias, coefficient, terms, chunk_rows=chunk_rows, rows=rows, gradients=gradients
        )
    return found.rows.sum(), found.lse, *gradients


@sum_op.register_fake
def _(x: Tensor, w: Tensor, *options: Any) -> tuple[Tensor, ...]:
    wide = compute_dtype(x.dtype)
    chunk_rows, max_valid_rows, accum_dtype, *wanted = options[-6:]
    gradients = _allocate(x, w, chunk_rows, max_valid_rows, accum_dtype, (wanted[0], wanted[1], wanted[2]))
    return x.new_empty((), dtype=wide), x.new_empty(x.shape[0], dtype=wide), *gradients


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, grad_x, grad_w, grad_bias = output
    wanted = inputs[-3:]
    ctx.set_materialize_grads(False)
    ctx.wanted = wanted
    ctx.num_inputs = len(inputs)
    ctx.dtypes = (grad_x.dtype, inputs[1].dtype, None if inputs[3] is None else inputs[3].dtype)
    ctx.save_for_backward(*(g for g, is_wanted in zip((grad_x, grad_w, grad_bias), wanted, strict=True) if is_wanted))


def _backward_of_sum(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if any(other is not None for other in others):
        raise RuntimeError("linear_cross_entropy can be differentiated once; its gradient has no gradient")
    kept = iter(ctx.saved_tensors)
    grad_x, grad_w, grad_bias = (
        scaled_copy(next(kept), grad, dtype) if is_wanted and grad is not None else None
        for is_wanted, dtype in zip(ctx.wanted, ctx.dtypes, strict=True)
    )
    return _as_inputs(grad_x, grad_w, grad_bias, ctx.num_inputs)


sum_op.register_autograd(_backward_of_sum, setup_context=_setup_sum)


@torch.library.custom_op("memwall::linear_cross_entropy_rows", mutates_args=())
def rows_op(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    chunk_rows: int,
    max_valid_rows: int | None,
    accum_dtype: torch.dtype,
    want_x: bool,
    want_w: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Weighted loss and lse of each row."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    coefficient, rows = _used_rows(x, target, token_weight, ignore_index, max_valid_rows)
    gradients = empty_gradients(x, w, _NONE_WANTED, w.dtype)
    with torch.autocast(x.device.type, enabled=False):
        found = chunked_loss(
            x, w, target, bias, coefficient, terms, chunk_rows=chunk_rows, rows=rows, gradients=gradients
        )
    return found.rows, found.lse


@rows_op.register_fake
def _(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = compute_dtype(x.dtype)
    return x.new_empty(x.shape[0], dtype=wide), x.new_empty(x.shape[0], dtype=wide)


@torch.library.custom_op("memwall::linear_cross_entropy_rows_backward", mutates_args=())
def _rows_backward_op(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    logit_scale: float,
    chunk_rows: int,
    max_valid_rows: int | None,
    accum_dtype: torch.dtype,
    want_x: bool,
    want_w: bool,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `rows_op` for the upstream gradient of each row."""
    terms = LossTerms(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    coefficient, rows = _used_rows(x, target, token_weight, ignore_index, max_valid_rows)
    gradients = _allocate(x, w, chunk_rows, max_valid_rows, accum_dtype, (want_x, want_w, want_bias))
    with torch.autocast(x.device.type, enabled=False):
        chunked_loss(
            x,
            w,
            target,
            bias,
            coefficient * grad,
            terms,
            chunk_rows=chunk_rows,
            rows=rows,
            gradients=gradients,
        )
    return _final(gradients, x, w)


@_rows_backward_op.register_fake
def _(grad: Tensor, x: Tensor, w: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    chunk_rows, max_valid_rows, accum_dtype, *wanted = options[-6:]
    return _final(_allocate(x, w, chunk_rows, max_valid_rows, accum_dtype, (wanted[0], wanted[1], wanted[2])), x, w)


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, w, target, bias, token_weight, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.options = options
    ctx.save_for_backward(x, w, target, bias, token_weight)


def _backward_of_rows(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    num_inputs = 5 + len(ctx.options)
    if grad is None:
        return (None,) * num_inputs
    x, w, bias = _rows_backward_op(grad, *ctx.saved_tensors, *ctx.options)
    want_x, want_w, want_bias = ctx.options[-3:]
    return _as_inputs(x if want_x else None, w if want_w else None, bias if want_bias else None, num_inputs)


rows_op.register_autograd(_backward_of_rows, setup_context=_setup_rows)


def _as_inputs(x: Tensor | None, w: Tensor | None, bias: Tensor | None, num_inputs: int) -> tuple[Tensor | None, ...]:
    """One gradient for each input of an operator: x, w, target, bias and what follows."""
    return (x, w, None, bias, *(None,) * (num_inputs - 4))


def _used_rows(
    x: Tensor, target: Tensor, token_weight: Tensor | None, ignore_index: int, max_valid_rows: int | None
) -> tuple[Tensor, Tensor | None]:
    """Coefficient of each row, and the rows that enter the matmul (None: all of them), found without a host sync."""
    is_valid = target != ignore_index
    coefficient = is_valid.to(compute_dtype(x.dtype))
    if token_weight is not None:
        coefficient = coefficient * token_weight.detach()
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


def _allocate(
    x: Tensor,
    w: Tensor,
    chunk_rows: int,
    max_valid_rows: int | None,
    accum_dtype: torch.dtype,
    wanted: tuple[bool, bool, bool],
) -> Gradients:
    num_rows = x.shape[0] if max_valid_rows is None else min(x.shape[0], max_valid_rows)
    num_chunks = 2 if num_rows > chunk_rows else 1
    return empty_gradients(x, w, wanted, weight_gradient_dtype(w.dtype, accum_dtype, num_chunks))


def _final(gradients: Gradients, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients in the dtypes of what they belong to (the bias has the input's)."""
    return gradients.x, gradients.w.to(w.dtype), gradients.bias.to(x.dtype)
