"""`dropout` as a custom operator, so that torch.compile sees it whole and fake tensors can run it.

It is linear in x: its gradient is the same operator, with the same mask, without a residual.
"""

from typing import Any

import torch
from torch import Tensor

from ._launch import runs_triton
from ._rows import as_rows

__all__ = ["dropout_op"]

_LEVELS = 1 << 16


@torch.library.custom_op("memwall::dropout", mutates_args=())
def dropout_op(x: Tensor, residual: Tensor | None, seed: Tensor, p: float, site: int, dtype: torch.dtype) -> Tensor:
    """`x` with elements dropped, plus `residual`, contiguous in `dtype`, rounded once."""
    result = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return result
    threshold = round(p * _LEVELS)
    scale = 0.0 if threshold == _LEVELS else _LEVELS / (_LEVELS - threshold)
    rows = (_rows(x), None if residual is None else _rows(residual), _rows(result))
    if runs_triton(result) and x.dtype != torch.float64:
        from ._dropout_kernel import launch_dropout

        launch_dropout(*rows, seed, threshold, scale, site)
    else:
        from ._dropout_reference import reference_dropout

        reference_dropout(*rows, seed, threshold, scale, site)
    return result


@dropout_op.register_fake
def _(x: Tensor, residual: Tensor | None, seed: Tensor, p: float, site: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, residual, seed, ctx.p, ctx.site, _ = inputs
    ctx.dtype, ctx.residual_dtype = x.dtype, None if residual is None else residual.dtype
    ctx.save_for_backward(seed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wants_x, wants_residual = ctx.needs_input_grad[:2]
    grad_x = dropout_op(grad, None, *ctx.saved_tensors, ctx.p, ctx.site, ctx.dtype) if wants_x else None
    return grad_x, grad.to(ctx.residual_dtype) if wants_residual else None, None, None, None, None


dropout_op.register_autograd(_backward, setup_context=_setup)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.view(1, 1) if tensor.dim() == 0 else as_rows(tensor)
