"""`rms_norm`, `add_rms_norm` and `layer_norm` over the last dimension, in one pass forward and one backward.

Everything is fp32 inside; where values are rounded is what `casting` says, so that results agree with the model whose
norm this stands in for. Kept for backward are what is normalised, and 4 bytes of each row (8 of LayerNorm). Label of
the action: *equivalent*. Inside `recompute_handles` the result is rebuilt for backward instead of kept: *bit-exact*
against this operation without them.
"""

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import DTYPES
from ..recompute import publish
from ._cost import NormShape, cost
from ._ops import add_norm_op, norm_apply_op, norm_op
from ._terms import Casting, NormTerms

__all__ = ["Casting", "NormShape", "add_rms_norm", "cost", "layer_norm", "rms_norm"]

_CASTINGS = ("llama", "gemma", "plain")


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    casting: Casting = "llama",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps).

    Args:
        x: [..., H], any strides.
        weight: [H].
        eps: added to the mean square.
        casting: `llama` rounds the normalised values to the dtype of x, then multiplies by weight in the promoted
            dtype; `gemma` multiplies by 1 + weight in fp32 and rounds once, to the dtype of x; `plain` likewise by
            weight, as torch.nn.RMSNorm does.
        out_dtype: of the result, instead of that dtype: rounded once, so it saves the cast of a layer under autocast.

    Raises:
        UsageError: shapes, dtypes or devices do not fit together.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.5]))
    tensor([0.8485, 0.5657])
    """
    return _norm("rms_norm", x, weight, None, NormTerms(eps, casting, is_centered=False), out_dtype)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """weight * (x - mean(x)) / sqrt(var(x) + eps) + bias; arguments and errors as of `rms_norm`.

    Under autocast on CUDA the result is fp32, as that of torch's own.

    >>> layer_norm(torch.tensor([3.0, 4.0]), bias=torch.tensor([1.0, 0.0]))
    tensor([2.0102e-05, 9.9998e-01])
    """
    return _norm("layer_norm", x, weight, bias, NormTerms(eps, "plain", is_centered=True), out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-6,
    casting: Casting = "llama",
    out_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual, and that sum: the next residual.

    Args:
        x: [..., H], any strides. residual: the same shape.
        weight: [H]. eps, casting, out_dtype: as of `rms_norm`, of the sum.
        residual_dtype: of the sum; default is the promoted dtype. What is normalised is the sum as it was rounded.

    >>> y, total = add_rms_norm(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 0.0]))
    >>> y, total
    (tensor([0.8485, 1.1314]), tensor([3., 4.]))
    """
    if x.shape != residual.shape or x.device != residual.device:
        raise UsageError(
            f"add_rms_norm wants x and residual of one shape on one device, found {list(x.shape)} on {x.device} and "
            f"{list(residual.shape)} on {residual.device}"
        )
    terms = NormTerms(eps, casting, is_centered=False)
    sum_dtype = residual_dtype or torch.promote_types(x.dtype, residual.dtype)
    _check("add_rms_norm", x, weight, None, terms, [residual.dtype, sum_dtype, out_dtype or sum_dtype])
    dtype = out_dtype or terms.result_dtype(sum_dtype, weight)
    result, total, mean, rstd = add_norm_op(x, residual, weight, None, *terms, dtype, sum_dtype)
    publish(result, norm_apply_op, total, mean, rstd, weight, None, *terms, dtype)
    return result, total


def _norm(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, terms: NormTerms, out_dtype: torch.dtype | None
) -> Tensor:
    _check(name, x, weight, bias, terms, [out_dtype or x.dtype])
    dtype = out_dtype or terms.result_dtype(x.dtype, weight)
    if out_dtype is None and terms.casting == "plain" and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    result: Tensor
    result, mean, rstd = norm_op(x, weight, bias, *terms, dtype)
    publish(result, norm_apply_op, x, mean, rstd, weight, bias, *terms, dtype)
    return result


def _check(
    name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, terms: NormTerms, dtypes: list[torch.dtype]
) -> None:
    if terms.casting not in _CASTINGS:
        raise UsageError(f"casting is one of {', '.join(_CASTINGS)}, not {terms.casting!r}")
    if x.dim() == 0:
        raise UsageError(f"{name} wants x [..., H], found a scalar")
    for role, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.shape != x.shape[-1:] or tensor.device != x.device):
            raise UsageError(
                f"{name} wants {role} [{x.shape[-1]}] on {x.device}, found {list(tensor.shape)} on {tensor.device}"
            )
    found = [x.dtype, *dtypes, *(tensor.dtype for tensor in (weight, bias) if tensor is not None)]
    if not set(found) <= set(DTYPES):
        raise UsageError(f"{name} wants floating dtypes of 16 to 64 bits, found {', '.join(map(str, found))}")
