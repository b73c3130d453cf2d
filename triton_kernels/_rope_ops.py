"""`rope` as custom operators, so that torch.compile sees it whole and fake tensors can run it."""

from typing import Any

import torch
from torch import Tensor

from ._launch import runs_triton

__all__ = ["rope_inplace_op", "rope_op"]


@torch.library.custom_op("memwall::rope", mutates_args=())
def rope_op(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int, is_inverse: bool) -> Tensor:
    """`x` rotated, or rotated back; laid out like `x` where that is dense."""
    result = torch.empty_like(x)
    if x.numel() > 0:
        _rotate(x, cos, sin, result, interleaved, sequence_dim, is_inverse)
    return result


@rope_op.register_fake
def _(x: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("memwall::rope_", mutates_args=("x",))
def rope_inplace_op(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, sequence_dim: int) -> None:
    """`rope_op` over `x`; its version counter moves."""
    if x.numel() > 0:
        _rotate(x, cos, sin, x, interleaved, sequence_dim, False)


@rope_inplace_op.register_fake
def _(x: Tensor, *others: Any) -> None:
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.sequence_dim, ctx.is_inverse = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    how = (ctx.interleaved, ctx.sequence_dim, not ctx.is_inverse)
    return rope_op(grad, *ctx.saved_tensors, *how), None, None, None, None, None


rope_op.register_autograd(_backward, setup_context=_setup)


def _rotate(
    x: Tensor, cos: Tensor, sin: Tensor, result: Tensor, interleaved: bool, sequence_dim: int, is_inverse: bool
) -> None:
    batch = x.shape[0] if x.dim() == 4 else 1
    tables = ((table if table.dim() == 3 else table[None]).expand(batch, -1, -1) for table in (cos, sin))
    tensors = (_by_heads(x, sequence_dim), *tables, _by_heads(result, sequence_dim))
    if runs_triton(x):
        from ._rope_kernel import launch_rope

        launch_rope(*tensors, interleaved=interleaved, is_inverse=is_inverse)
    else:
        from ._rope_reference import reference_rope

        reference_rope(*tensors, interleaved=interleaved, is_inverse=is_inverse)


def _by_heads(x: Tensor, sequence_dim: int) -> Tensor:
    """A view [batch, heads, T, D]."""
    view = x
    if sequence_dim == -3:
        view = view.transpose(-3, -2)
    while view.dim() < 4:
        view = view[None]
    return view
