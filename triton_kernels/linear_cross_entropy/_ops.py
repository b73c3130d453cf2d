"""`linear_cross_entropy` as three custom operators, so that torch.compile sees it whole and fake tensors can run it.

`sum_op` computes gradients in forward, chunk by chunk, and keeps them (gradients of the sum are known up to one
factor); `rows_op` keeps its inputs and computes logits again in backward, where each row's upstream gradient is known.
Gradients are not divided by the number of rows before backward: in fp16 they would underflow.
"""

from typing import Any

import torch
from torch import Tensor

from .._rows import compute_dtype
from ..scaled_copy import scaled_copy
from ._chunks import Gradients, LossCall, chunked_loss, empty_gradients

# The fields of LossCall, as a torch schema.
_CALL = (
    "Tensor x, Tensor w, Tensor target, Tensor? bias, int ignore_index, float label_smoothing, float softcap, "
    "float logit_scale, SymInt chunk_rows, bool want_x, bool want_w, bool want_bias"
)


@torch.library.custom_op(
    "memwall::linear_cross_entropy_sum", mutates_args=(), schema=f"({_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def sum_op(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the sum of the losses, and gradients of it for input, weight and bias."""
    call = LossCall(*inputs)
    gradients = empty_gradients(call)
    rows = _run(call, *_used_rows(call), gradients)
    return rows.sum(), *gradients


@sum_op.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    call = LossCall(*inputs)
    return call.x.new_empty((), dtype=compute_dtype(call.x.dtype)), *empty_gradients(call)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, *gradients = output
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


@torch.library.custom_op("memwall::linear_cross_entropy_rows", mutates_args=(), schema=f"({_CALL}) -> Tensor")
def rows_op(*inputs: Any) -> Tensor:
    """Returns the loss of each row."""
    call = LossCall(*inputs)._replace(want_x=False, want_w=False, want_bias=False)
    return _run(call, *_used_rows(call), empty_gradients(call))


@rows_op.register_fake
def _(*inputs: Any) -> Tensor:
    x = LossCall(*inputs).x
    return x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype))


@torch.library.custom_op(
    "memwall::linear_cross_entropy_rows_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def _rows_backward_op(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of `rows_op` for the upstream gradient of each row."""
    call = LossCall(*inputs)
    gradients = empty_gradients(call)
    coefficient, rows = _used_rows(call)
    _run(call, coefficient * grad, rows, gradients)
    return _final(call, gradients)


@_rows_backward_op.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = LossCall(*inputs)
    return _final(call, empty_gradients(call))


def _setup_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    call = LossCall(*inputs)
    ctx.set_materialize_grads(False)
    ctx.options = inputs[len(call.tensors) :]
    ctx.save_for_backward(*call.tensors)


def _backward_of_rows(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return _as_inputs(None, None, None)
    call = LossCall(*ctx.saved_tensors, *ctx.options)
    gradients = _rows_backward_op(grad, *call)
    return _as_inputs(*(g if is_wanted else None for g, is_wanted in zip(gradients, call.wanted, strict=True)))


rows_op.register_autograd(_backward_of_rows, setup_context=_setup_rows)


def _as_inputs(x: Tensor | None, w: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns one gradient for each argument of an operator."""
    return (x, w, None, bias, *(None,) * (len(LossCall._fields) - 4))


def _run(call: LossCall, coefficient: Tensor, rows: Tensor | None, gradients: Gradients) -> Tensor:
    with torch.autocast(call.x.device.type, enabled=False):
        return chunked_loss(call, coefficient, rows, gradients)


def _used_rows(call: LossCall) -> tuple[Tensor, Tensor | None]:
    """Returns each row's coefficient, and the rows that enter the matmul (None: all of them).

    Only on the CPU are ignored rows left out: how many there are is not asked of another device.
    """
    is_valid = call.target != call.ignore_index
    coefficient = is_valid.to(compute_dtype(call.x.dtype))
    if call.x.device.type != "cpu":
        return coefficient, None
    rows = is_valid.nonzero().squeeze(1)
    return coefficient, None if rows.shape[0] == call.target.shape[0] else rows


def _final(call: LossCall, gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients in the dtypes of what they belong to (the bias has the input's)."""
    return gradients.x, gradients.w.to(call.w.dtype), gradients.bias.to(call.x.dtype)
