"""`rms_norm` over the last dimension, of which the input is kept for backward, and 4 bytes of each row.

On a GPU torch's own kernels compute it: on an H100 they kept what one in Triton did, and were faster over the rows of
most models (benchmarks/README.md). Everything is fp32 inside; on a CPU values are rounded where `casting` says.
Label of the action: *equivalent*.
"""

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import DTYPES
from ._ops import norm_op
from ._terms import Casting, NormTerms

__all__ = ["Casting", "rms_norm"]

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
    _check(x, weight, casting)
    terms = NormTerms(eps, casting)
    dtype = x.dtype if weight is None or not terms.rounds else torch.promote_types(x.dtype, weight.dtype)
    if casting == "plain" and x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.promote_types(dtype, torch.float32)
    result: Tensor = norm_op(x, weight, *terms, dtype)[0]
    return result


def _check(x: Tensor, weight: Tensor | None, casting: str) -> None:
    if casting not in _CASTINGS:
        raise UsageError(f"casting is one of {', '.join(_CASTINGS)}, not {casting!r}")
    if x.dim() == 0:
        raise UsageError("rms_norm wants x [..., H], found a scalar")
    if weight is not None and (weight.shape != x.shape[-1:] or weight.device != x.device):
        raise UsageError(
            f"rms_norm wants weight [{x.shape[-1]}] on {x.device}, found {list(weight.shape)} on {weight.device}"
        )
    found = [x.dtype, *([] if weight is None else [weight.dtype])]
    if not set(found) <= set(DTYPES):
        raise UsageError(f"rms_norm wants floating dtypes of 16 to 64 bits, found {', '.join(map(str, found))}")
