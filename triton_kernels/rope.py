"""`rope`: rotary position embedding in one pass, in place where the caller gives the tensor away.

Queries and keys are rotated one call each, so that they may have different numbers of heads. Backward is the rotation
the other way round: nothing is kept but the tables. Everything is fp32 inside and rounded once. Label of the action:
*equivalent* (eager rounds both products and their sum).
"""

from typing import Any

import torch
from torch import Tensor

from memwall.errors import UsageError

from ._ownership import check_given_away
from ._rope_cost import RopeShape, cost
from ._rope_ops import rope_inplace_op, rope_op
from ._rows import DTYPES

__all__ = ["RopeShape", "cost", "rope"]


def rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    sequence_dim: int = -2,
    inplace: bool = False,
) -> Tensor:
    """Rotates pairs of features (a, b) to (a cos - b sin, b cos + a sin).

    Args:
        x: [batch, heads, T, D], [heads, T, D] or [T, D], any strides; with `sequence_dim=-3` [batch, T, heads, D] or
            [T, heads, D].
        cos: [T, P] or [batch, T, P], any strides, one number for each pair, 2 P <= D: features from 2 P on stay as they
            are. Of tables that hold each number twice, as transformers' do, the first half: `cos[..., :P]`.
        sin: like `cos`.
        interleaved: pairs are features (2 i, 2 i + 1), as in GPT-J; else (i, i + P), as in Llama.
        sequence_dim: where T stands, -2 or -3.
        inplace: the caller gives `x` away: the result takes its place. An operation that saved it as well fails in its
            own backward, told by autograd. Under `torch.compile`, which plans buffers itself, this is left to it.

    Returns:
        The result in the dtype of `x`; `x` itself where it was given away.

    Raises:
        UsageError: shapes, dtypes or devices do not fit together; `x` is not the caller's to give.

    >>> rope(torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))
    tensor([[-2.,  1.]])
    """
    _check(x, cos, sin, sequence_dim)
    if not inplace or torch.compiler.is_compiling():
        result: Tensor = rope_op(x, cos, sin, interleaved, sequence_dim, False)
        return result
    check_given_away("inplace", x)
    rotated: Tensor = _InPlace.apply(x, cos, sin, interleaved, sequence_dim)
    return rotated


class _InPlace(torch.autograd.Function):
    """torch's custom operators that write over an argument have no autograd of their own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, *how: Any) -> Tensor:
        rope_inplace_op(x, cos, sin, *how)
        ctx.mark_dirty(x)
        ctx.how = how
        ctx.save_for_backward(cos, sin)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Not in place: who else holds the upstream gradient is not known.
        return rope_op(grads[0], *ctx.saved_tensors, *ctx.how, True), None, None, None, None


def _check(x: Tensor, cos: Tensor, sin: Tensor, sequence_dim: int) -> None:
    if sequence_dim not in (-2, -3):
        raise UsageError(f"rope finds the sequence in dimension -2 or -3, not {sequence_dim}")
    if not -sequence_dim <= x.dim() <= 4:
        raise UsageError(
            f"rope wants x of {-sequence_dim} to 4 dimensions for sequence_dim={sequence_dim}, found {list(x.shape)}"
        )
    length, batch = x.shape[sequence_dim], x.shape[0] if x.dim() == 4 else 1
    fits = cos.dim() in (2, 3) and cos.shape[-2] == length and 2 * cos.shape[-1] <= x.shape[-1]
    if not fits or sin.shape != cos.shape or (cos.dim() == 3 and cos.shape[0] not in (1, batch)):
        raise UsageError(
            f"rope of {list(x.shape)} wants cos and sin [{length}, P] or [{batch}, {length}, P] with 2 P at most "
            f"{x.shape[-1]}, one number for each pair, found {list(cos.shape)} and {list(sin.shape)}"
        )
    if not {x.dtype, cos.dtype, sin.dtype} <= set(DTYPES):
        raise UsageError(f"rope wants floating dtypes of 16 to 64 bits, found {x.dtype}, {cos.dtype}, {sin.dtype}")
    if len({x.device, cos.device, sin.device}) > 1:
        raise UsageError(f"rope wants all tensors on one device, found {x.device}, {cos.device}, {sin.device}")
    if cos.requires_grad or sin.requires_grad:
        raise UsageError("rope gives cos and sin no gradient; detach them")
