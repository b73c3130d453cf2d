"""The half of the norm on a GPU: torch's own fused kernels, which keep a row's mean square and nothing else.

Everything is fp32 inside, and results are rounded once, after the weight, whatever `casting` says: at another point
than in a model that rounds the normalised values first.
"""

import torch
from torch import Tensor

from memwall.torch_internals.operators import operator_named

from ._terms import NormTerms

_FORWARD = operator_named("_fused_rms_norm.default")
_BACKWARD = operator_named("_fused_rms_norm_backward.default")


def fused_norm(x: Tensor, weight: Tensor | None, terms: NormTerms, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns what `reference_norm` does of x [..., columns], in `dtype`, and the rows' figures as [rows]."""
    wide = torch.promote_types(x.dtype, dtype)
    result, rstd = _FORWARD(x.to(wide), x.shape[-1:], _factor(weight, terms, wide), terms.eps)
    return result.to(dtype), rstd.reshape(-1)


def fused_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, terms: NormTerms, *, wants_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """Returns the gradients of x and of the weight; None where that is not wanted."""
    wide = torch.promote_types(x.dtype, grad.dtype)
    factor, per_row = _factor(weight, terms, wide), rstd.view(*x.shape[:-1], 1)
    of_x, of_weight = _BACKWARD(grad.to(wide), x.to(wide), x.shape[-1:], per_row, factor, [True, wants_weight])
    if weight is None or not wants_weight:
        return of_x.to(x.dtype), None
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


def _factor(weight: Tensor | None, terms: NormTerms, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else (weight + terms.weight_offset if terms.weight_offset else weight).to(dtype)
