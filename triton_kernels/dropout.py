"""`dropout`, with a residual added in the same pass: its mask is drawn again in backward, from the seed, not kept.

The mask belongs to seed, site and an element's index, whatever the tensor's strides and dtype are; CPU and GPU draw the
same one. It is another stream of random numbers than torch's, of the same distribution. Label of the action: *changes
numerics*.
"""

import torch
from torch import Tensor

from memwall.errors import UsageError

from ._dropout_cost import DropoutShape, cost
from ._dropout_ops import dropout_op
from ._rows import DTYPES

__all__ = ["DropoutShape", "cost", "dropout"]


def dropout(
    x: Tensor,
    p: float = 0.5,
    *,
    residual: Tensor | None = None,
    training: bool = True,
    seed: Tensor | int | None = None,
    site: int = 0,
) -> Tensor:
    """Zeroes each element with probability p, scales the others up so that the mean stays, and adds `residual`.

    Args:
        x: [..., H], any strides.
        p: 0 to 1, rounded to a multiple of 2^-16; the scale fits what was rounded.
        residual: the shape of `x`. Another dtype is promoted, as torch does.
        training: False drops nothing.
        seed: 0 to 2^63 - 1, or an int64 tensor of one element on the device of `x`, which the host does not read: the
            same seed draws the same mask. None takes one from torch's generator, which is put back where a checkpointed
            block runs again, and counts in a CUDA graph.
        site: 0 to 2^32 - 1, tells masks of one seed apart.

    Raises:
        UsageError: p, seed, site, shapes, dtypes or devices are out of range or do not fit together.

    >>> dropout(torch.ones(6), 0.5, seed=0)
    tensor([2., 0., 2., 2., 2., 2.])
    """
    _check(x, p, residual, seed, site)
    if not training or p == 0.0:
        return x if residual is None else x + residual
    if seed is None:
        seed = torch.randint(0, (1 << 63) - 1, (), device=x.device)
    elif isinstance(seed, int):
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    result: Tensor = dropout_op(x, residual, seed, float(p), site, dtype)
    return result


def _check(x: Tensor, p: float, residual: Tensor | None, seed: Tensor | int | None, site: int) -> None:
    if not 0.0 <= p <= 1.0:
        raise UsageError(f"dropout wants a probability between 0 and 1, not {p}")
    if not 0 <= site < 1 << 32:
        raise UsageError(f"dropout tells sites 0 to 2^32 - 1 apart, not {site}")
    if isinstance(seed, int) and not 0 <= seed < 1 << 63:
        raise UsageError(f"dropout wants a seed from 0 to 2^63 - 1, not {seed}")
    if isinstance(seed, Tensor) and (seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != x.device):
        raise UsageError(
            f"dropout wants a seed of one int64 on {x.device}, found {seed.dtype} {list(seed.shape)} on {seed.device}"
        )
    if residual is not None and (residual.shape != x.shape or residual.device != x.device):
        raise UsageError(
            f"dropout wants residual {list(x.shape)} on {x.device}, found {list(residual.shape)} on {residual.device}"
        )
    found = [x.dtype] if residual is None else [x.dtype, residual.dtype]
    if not set(found) <= set(DTYPES):
        raise UsageError(f"dropout wants floating dtypes of 16 to 64 bits, found {', '.join(map(str, found))}")
