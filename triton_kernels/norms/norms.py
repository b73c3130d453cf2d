"""`rms_norm` and `layer_norm` over the last dimension, in one pass forward and one backward.

Everything is fp32 inside; where values are rounded is what `casting` says, so that results agree with the model whose
norm this stands in for. Kept for backward are the input, and 4 bytes of each row (8 of LayerNorm). Label of the action:
*equivalent*.
"""

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import DTYPES
from ._ops import norm_op
from ._terms import Casting, NormTerms

__all__ = ["Casting", "layer_norm", "rms_norm"]

_CASTINGS = ("llama", "gemma", "plain")


def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, casting: Casting = "llama") -> Tensor:
    """Returns weight * x / sqrt(mean(x^2) + eps).

    Args:
        x: [..., H], any strides.
        weight: [H].
        eps: added to the mean square.
        casting: `llama` rounds the normalised values to the dtype of x, then multiplies by weight in the promoted
            dtype; `gemma` multiplies by 1 + weight in fp32 and rounds once, to the dtype of x; `plain` likewise by
            weight, as torch.nn.RMSNorm does.

    Raises:
        UsageError: shapes, dtypes or devices do not fit together.

    >>> rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 0.5]))
    tensor([0.8485, 0.5657])
    """
    return _norm("rms_norm", x, weight, None, NormTerms(eps, casting, is_centered=False))


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Returns weight * (x - mean(x)) / sqrt(var(x) + eps) + bias; arguments and errors are those of `rms_norm`.

    Under autocast on CUDA the result is fp32, as that of torch's own.

    >>> layer_norm(torch.tensor([3.0, 4.0]), bias=torch.tensor([1.0, 0.0]))
    tensor([2.0102e-05, 9.9998e-01])
    """
    return _norm("layer_norm", x, weight, bias, NormTerms(eps, "plain", is_centered=True))


def _norm(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, terms: NormTerms) -> Tensor:
    _check(name, x, weight, bias, terms)
    dtype = x.dtype if weight is None or not terms.rounds else torch.promote_types(x.dtype, weight.dtype)
    if terms.casting == "plain" and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    result: Tensor = norm_op(x, weight, bias, *terms, dtype)[0]
    return result


def _check(name: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, terms: NormTerms) -> None:
    if terms.casting not in _CASTINGS:
        raise UsageError(f"casting is one of {', '.join(_CASTINGS)}, not {terms.casting!r}")
    if x.dim() == 0:
        raise UsageError(f"{name} wants x [..., H], found a scalar")
    for role, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and (tensor.shape != x.shape[-1:] or tensor.device != x.device):
            raise UsageError(
                f"{name} wants {role} [{x.shape[-1]}] on {x.device}, found {list(tensor.shape)} on {tensor.device}"
            )
    found = [x.dtype, *(tensor.dtype for tensor in (weight, bias) if tensor is not None)]
    if not set(found) <= set(DTYPES):
        raise UsageError(f"{name} wants floating dtypes of 16 to 64 bits, found {', '.join(map(str, found))}")
