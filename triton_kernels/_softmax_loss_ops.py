"""`softmax_cross_entropy` as custom operators, so that torch.compile sees it whole and fake tensors can run it.

Forward keeps the logits and two numbers of each row; backward makes the gradient from them, in new memory or, where
the caller has given the logits away, over them.
"""

from typing import Any

import torch
from torch import Tensor

from ._launch import runs_triton
from ._loss_terms import LossTerms
from ._rows import compute_dtype
from ._softmax_loss_reference import RowSums

__all__ = ["as_matrices", "softmax_loss_op"]

_TERMS = "int ignore_index, float label_smoothing, float z_loss, float softcap, float logit_scale"


@torch.library.custom_op(
    "memwall::softmax_loss",
    mutates_args=(),
    schema=f"(Tensor logits, Tensor target, {_TERMS}, bool overwrites_logits) -> (Tensor, Tensor, Tensor)",
)
def softmax_loss_op(logits: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each row of `logits [..., V]` for the int64 `target [rows]`, and its `RowSums`."""
    loss, *sums = _empty_rows(logits)
    if logits.numel() > 0:
        _forward(loss)(as_matrices(logits), target, loss, RowSums(*sums), LossTerms(*options[:-1]))
    return loss, *sums  # type: ignore[return-value]


@softmax_loss_op.register_fake
def _(logits: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_rows(logits)


@torch.library.custom_op(
    "memwall::softmax_gradient",
    mutates_args=(),
    schema=f"(Tensor upstream, Tensor logits, Tensor target, Tensor largest, Tensor total, {_TERMS}) -> Tensor",
)
def _gradient_op(
    upstream: Tensor, logits: Tensor, target: Tensor, largest: Tensor, total: Tensor, *terms: Any
) -> Tensor:
    """Gradient of `softmax_loss_op` for the upstream gradient of each row, contiguous."""
    result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if logits.numel() > 0:
        sums = RowSums(largest, total)
        _backward(total)(upstream, as_matrices(logits), target, sums, as_matrices(result), LossTerms(*terms))
    return result


@_gradient_op.register_fake
def _(upstream: Tensor, logits: Tensor, *others: Any) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@torch.library.custom_op(
    "memwall::softmax_gradient_",
    mutates_args=("logits",),
    schema=f"(Tensor upstream, Tensor(a!) logits, Tensor target, Tensor largest, Tensor total, {_TERMS}) -> ()",
)
def _overwriting_gradient_op(
    upstream: Tensor, logits: Tensor, target: Tensor, largest: Tensor, total: Tensor, *terms: Any
) -> None:
    """`_gradient_op` over the logits, whose version counter it moves: whoever else saved them is told by autograd."""
    if logits.numel() > 0:
        rows = as_matrices(logits, must_be_view=True)
        _backward(total)(upstream, rows, target, RowSums(largest, total), rows, LossTerms(*terms))


@_overwriting_gradient_op.register_fake
def _(upstream: Tensor, logits: Tensor, *others: Any) -> None:
    return None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, *ctx.terms, ctx.overwrites_logits = inputs
    ctx.is_spent = False
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(logits, target, *output[1:])


def _backward_of_loss(ctx: Any, upstream: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    nothing = (None,) * (len(ctx.terms) + 2)
    if upstream is None:
        return (None, *nothing)
    if not ctx.overwrites_logits:
        return (_gradient_op(upstream, *ctx.saved_tensors, *ctx.terms), *nothing)
    if ctx.is_spent:
        raise RuntimeError(
            "softmax_cross_entropy(overwrite_logits=True) goes backward once: its logits are their gradient now; "
            "leave overwrite_logits out to go backward again"
        )
    ctx.is_spent = True
    logits, *kept = ctx.saved_tensors
    _overwriting_gradient_op(upstream, logits, *kept, *ctx.terms)
    return (logits.detach(), *nothing)


softmax_loss_op.register_autograd(_backward_of_loss, setup_context=_setup)


def as_matrices(logits: Tensor, *, must_be_view: bool = False) -> Tensor:
    """[outer, inner, V] of logits [..., V]: a view of up to three dimensions, however they lie in memory.

    Raises:
        RuntimeError: it `must_be_view` and cannot be one.
    """
    if logits.dim() < 3:
        return logits.view(1, -1, logits.shape[-1]) if logits.dim() == 1 else logits.unsqueeze(0)
    shape = (logits.shape[:-2].numel(), *logits.shape[-2:])
    return logits.view(shape) if must_be_view else logits.reshape(shape)


def _empty_rows(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = logits.shape[:-1].numel()
    loss, largest, total = (
        torch.empty(rows, dtype=compute_dtype(logits.dtype), device=logits.device) for _ in range(3)
    )
    return loss, largest, total


def _forward(rows: Tensor) -> Any:
    if runs_triton(rows):
        from ._softmax_loss_kernel import launch_softmax_loss

        return launch_softmax_loss
    from ._softmax_loss_reference import reference_softmax_loss

    return reference_softmax_loss


def _backward(rows: Tensor) -> Any:
    if runs_triton(rows):
        from ._softmax_loss_kernel import launch_softmax_gradient

        return launch_softmax_gradient
    from ._softmax_loss_reference import reference_softmax_gradient

    return reference_softmax_gradient
