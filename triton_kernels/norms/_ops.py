"""The norm as custom operators, so that torch.compile sees it whole and fake tensors can run it."""

from typing import Any

import torch
from torch import Tensor

from .._rows import as_rows, compute_dtype
from ._fused import fused_norm, fused_norm_backward
from ._reference import reference_norm, reference_norm_backward
from ._terms import NormTerms

_TERMS = "float eps, str casting"


@torch.library.custom_op(
    "memwall::norm",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? weight, {_TERMS}, ScalarType result_dtype) -> (Tensor, Tensor)",
)
def norm_op(x: Tensor, weight: Tensor | None, eps: float, casting: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the norm, contiguous, in `dtype`, and 1 / root of each row's mean square."""
    terms = NormTerms(eps, casting)
    if _is_fused(x):
        return fused_norm(x, weight, terms, dtype)
    result, rstd = _empty_results(x, dtype)
    if x.numel() > 0:
        reference_norm(as_rows(x), weight, as_rows(result), rstd, terms)
    return result, rstd


@norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, eps: float, casting: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _empty_results(x, dtype)


@torch.library.custom_op(
    "memwall::norm_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor? weight, Tensor rstd, {_TERMS}, bool wants_weight) -> (Tensor, Tensor)",
)
def _norm_backward_op(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, casting: str, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight; that of the weight is empty where it is not wanted."""
    terms = NormTerms(eps, casting)
    if _is_fused(x):
        of_x, of_weight = fused_norm_backward(grad, x, weight, rstd, terms, wants_weight=wants_weight)
        return of_x, x.new_empty(0) if of_weight is None else of_weight
    grad_x, grad_weight = _empty_gradients(x, weight, wants_weight)
    if x.numel() == 0:
        return grad_x, grad_weight.zero_()
    reference_norm_backward(as_rows(grad), as_rows(x), weight, rstd, as_rows(grad_x), grad_weight, terms)
    return grad_x, grad_weight


@_norm_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, Tensor]:
    return _empty_gradients(x, weight, others[-1])


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, *ctx.terms, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, output[1])


def _backward_of_norm(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    x, weight, rstd = ctx.saved_tensors
    wants_weight = ctx.needs_input_grad[1]
    found = _norm_backward_op(grad, x, weight, rstd, *ctx.terms, wants_weight)
    return (found[0], found[1] if wants_weight else None, None, None, None)


norm_op.register_autograd(_backward_of_norm, setup_context=_setup_norm)


def _is_fused(x: Tensor) -> bool:
    """Tells whether torch's kernels norm this: fp64, which only tests use, they compute in fp32."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and x.numel() > 0


def _empty_results(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    num_rows = x.shape[:-1].numel()
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(num_rows, dtype=compute_dtype(x.dtype), device=x.device),
    )


def _empty_gradients(x: Tensor, weight: Tensor | None, wants_weight: bool) -> tuple[Tensor, Tensor]:
    weight_dtype = x.dtype if weight is None else weight.dtype
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape[-1] if wants_weight else 0, dtype=weight_dtype, device=x.device),
    )
