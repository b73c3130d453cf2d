"""The norms as custom operators, so that torch.compile sees them whole and fake tensors can run them."""

from typing import Any

import torch
from torch import Tensor

from .._launch import half_for
from .._rows import as_rows, compute_dtype
from ._terms import NormTerms

_TERMS = "float eps, str casting, bool is_centered"
_PARAMETERS = f"Tensor? weight, Tensor? bias, {_TERMS}, ScalarType result_dtype"


@torch.library.custom_op(
    "memwall::norm", mutates_args=(), schema=f"(Tensor x, {_PARAMETERS}) -> (Tensor, Tensor, Tensor)"
)
def norm_op(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    casting: str,
    is_centered: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the norm, contiguous, in `dtype`; the mean of each row (empty if not centered); 1 / deviation."""
    terms = NormTerms(eps, casting, is_centered)
    result, mean, rstd = _empty_results(x, dtype, terms)
    if x.numel() > 0:
        run = half_for(rstd, __package__, "norm")
        run(as_rows(x), *_vectors(weight, bias), as_rows(result), mean, rstd, terms)
    return result, mean, rstd


@norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *terms, dtype = options
    return _empty_results(x, dtype, NormTerms(*terms))


@torch.library.custom_op(
    "memwall::norm_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, {_TERMS}, "
    "bool wants_weight, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
)
def _norm_backward_op(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    eps: float,
    casting: str,
    is_centered: bool,
    wants_weight: bool,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns gradients of x, weight and bias; empty where they are not wanted."""
    results = _empty_gradients(x, weight, wants_weight, bias_dtype)
    if x.numel() == 0:
        return results[0], results[1].zero_(), results[2].zero_()
    terms = NormTerms(eps, casting, is_centered)
    known = None if weight is None else weight.contiguous()
    run = half_for(rstd, __package__, "norm_backward", kernels="_backward_kernel")
    run(as_rows(grad), as_rows(x), known, mean, rstd, as_rows(results[0]), *results[1:], terms)
    return results


@_norm_backward_op.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(x, weight, *others[-2:])


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *ctx.terms, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *output[-2:])


def _backward_of_norm(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    x, weight, mean, rstd = ctx.saved_tensors
    _, wants_weight, wants_bias = ctx.needs_input_grad[:3]
    bias_dtype = ctx.bias_dtype if wants_bias else None
    found = _norm_backward_op(grad, x, weight, mean, rstd, *ctx.terms, wants_weight, bias_dtype)
    return (found[0], found[1] if wants_weight else None, found[2] if wants_bias else None, None, None, None, None)


norm_op.register_autograd(_backward_of_norm, setup_context=_setup_norm)


def _empty_results(x: Tensor, dtype: torch.dtype, terms: NormTerms) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, wide = x.shape[:-1].numel(), compute_dtype(x.dtype)
    return (
        torch.empty(x.shape, dtype=dtype, device=x.device),
        torch.empty(num_rows if terms.is_centered else 0, dtype=wide, device=x.device),
        torch.empty(num_rows, dtype=wide, device=x.device),
    )


def _empty_gradients(
    x: Tensor, weight: Tensor | None, wants_weight: bool, bias_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    weight_dtype = x.dtype if weight is None else weight.dtype
    return (
        torch.empty(x.shape, dtype=x.dtype, device=x.device),
        torch.empty(x.shape[-1] if wants_weight else 0, dtype=weight_dtype, device=x.device),
        torch.empty(0 if bias_dtype is None else x.shape[-1], dtype=bias_dtype or x.dtype, device=x.device),
    )


def _vectors(weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return None if weight is None else weight.contiguous(), None if bias is None else bias.contiguous()
