"""The norms as custom operators, so that torch.compile sees them whole and fake tensors can run them.

`norm_op` normalises, `add_norm_op` adds a residual first, `norm_apply_op` gives a result again from what the first two
found about each row: the recipe of recompute handles.
"""

from typing import Any

import torch
from torch import Tensor

from .._launch import runs_triton
from .._rows import as_rows, compute_dtype
from ._terms import NormTerms

__all__ = ["add_norm_op", "norm_apply_op", "norm_op"]

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
    """The norm over the last dimension, contiguous, in `dtype`; mean (empty if not centered) and 1 / deviation."""
    terms = NormTerms(eps, casting, is_centered)
    result, mean, rstd = _empty_results(x, dtype, terms)
    if x.numel() > 0:
        _forward(rstd)(as_rows(x), None, *_vectors(weight, bias), as_rows(result), None, mean, rstd, terms)
    return result, mean, rstd


@norm_op.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    *terms, dtype = options
    return _empty_results(x, dtype, NormTerms(*terms))


@torch.library.custom_op(
    "memwall::add_norm",
    mutates_args=(),
    schema=f"(Tensor x, Tensor residual, {_PARAMETERS}, ScalarType sum_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)
def add_norm_op(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    casting: str,
    is_centered: bool,
    dtype: torch.dtype,
    sum_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`norm_op` of x + residual rounded to `sum_dtype`, and that sum."""
    terms = NormTerms(eps, casting, is_centered)
    total = torch.empty(x.shape, dtype=sum_dtype, device=x.device)
    result, mean, rstd = _empty_results(total, dtype, terms)
    if x.numel() > 0:
        inputs = (as_rows(x), as_rows(residual), *_vectors(weight, bias))
        _forward(rstd)(*inputs, as_rows(result), as_rows(total), mean, rstd, terms)
    return result, total, mean, rstd


@add_norm_op.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    *terms, dtype, sum_dtype = options
    total = torch.empty(x.shape, dtype=sum_dtype, device=x.device)
    result, mean, rstd = _empty_results(total, dtype, NormTerms(*terms))
    return result, total, mean, rstd


@torch.library.custom_op(
    "memwall::norm_apply",
    mutates_args=(),
    schema=f"(Tensor x, Tensor mean, Tensor rstd, {_PARAMETERS}) -> Tensor",
)
def norm_apply_op(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    casting: str,
    is_centered: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The first result of `norm_op` again, bit by bit, from the others; x is what was normalised."""
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() > 0:
        terms = NormTerms(eps, casting, is_centered)
        _apply(rstd)(as_rows(x), *_vectors(weight, bias), mean, rstd, as_rows(result), terms)
    return result


@norm_apply_op.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty(x.shape, dtype=others[-1], device=x.device)


@torch.library.custom_op(
    "memwall::norm_backward",
    mutates_args=(),
    schema=f"(Tensor grad, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, {_TERMS}, "
    "bool wants_weight, ScalarType? bias_dtype) -> (Tensor, Tensor, Tensor)",
)
def _norm_backward_op(
    grad: Tensor,
    grad_sum: Tensor | None,
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
    """Gradients of what was normalised, of weight and of bias; empty where they are not wanted."""
    results = _empty_gradients(x, weight, wants_weight, bias_dtype)
    if x.numel() == 0:
        return results[0], results[1].zero_(), results[2].zero_()
    terms = NormTerms(eps, casting, is_centered)
    known = None if weight is None else weight.contiguous()
    rows = (as_rows(grad), None if grad_sum is None else as_rows(grad_sum), as_rows(x))
    _backward(rstd)(*rows, known, mean, rstd, as_rows(results[0]), *results[1:], terms)
    return results


@_norm_backward_op.register_fake
def _(grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    return _empty_gradients(x, weight, *others[-2:])


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, *terms, _ = inputs
    _keep(ctx, x, weight, bias, terms, output[-2:])


def _setup_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, weight, bias, *terms, _, _ = inputs
    ctx.dtypes = (x.dtype, residual.dtype)
    _keep(ctx, output[1], weight, bias, terms, output[-2:])


def _keep(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, terms: list[Any], found: tuple[Tensor, ...]
) -> None:
    ctx.set_materialize_grads(False)
    ctx.terms = terms
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *found)


def _backward_of_norm(ctx: Any, grad: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    return (*_gradients(ctx, grad, None, 1), None, None, None, None)


def _backward_of_add_norm(
    ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad is None:
        grad_x, weight, bias = grad_sum, None, None
    else:
        grad_x, weight, bias = _gradients(ctx, grad, grad_sum, 2)
    ours = tuple(None if grad_x is None else grad_x.to(dtype) for dtype in ctx.dtypes)
    return (*ours, weight, bias, None, None, None, None, None)


def _gradients(
    ctx: Any, grad: Tensor, grad_sum: Tensor | None, num_before: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of what was normalised, of weight and of bias, which follow `num_before` inputs."""
    x, weight, mean, rstd = ctx.saved_tensors
    wants_weight, wants_bias = ctx.needs_input_grad[num_before : num_before + 2]
    bias_dtype = ctx.bias_dtype if wants_bias else None
    found = _norm_backward_op(grad, grad_sum, x, weight, mean, rstd, *ctx.terms, wants_weight, bias_dtype)
    return found[0], found[1] if wants_weight else None, found[2] if wants_bias else None


norm_op.register_autograd(_backward_of_norm, setup_context=_setup_norm)
add_norm_op.register_autograd(_backward_of_add_norm, setup_context=_setup_add_norm)


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


def _forward(rstd: Tensor) -> Any:
    if runs_triton(rstd):
        from ._kernel import launch_norm

        return launch_norm
    from ._reference import reference_norm

    return reference_norm


def _apply(rstd: Tensor) -> Any:
    if runs_triton(rstd):
        from ._kernel import launch_norm_apply

        return launch_norm_apply
    from ._reference import reference_norm_apply

    return reference_norm_apply


def _backward(rstd: Tensor) -> Any:
    if runs_triton(rstd):
        from ._backward_kernel import launch_norm_backward

        return launch_norm_backward
    from ._reference import reference_norm_backward

    return reference_norm_backward
