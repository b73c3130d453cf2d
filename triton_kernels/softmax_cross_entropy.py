"""`softmax_cross_entropy`: the loss from logits that exist already, without an fp32 copy of them or their softmax.

Backward needs the logits as they are and two numbers of each row. Where the caller gives the logits away
(`overwrite_logits`), their gradient takes their place: then the loss needs no memory of their size at all. From hidden
states and a head `linear_cross_entropy` needs still less, since its logits are never whole. Label of the action:
*equivalent*.
"""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from memwall.errors import UsageError

from ._loss_terms import LossTerms, Reduction, check_loss_options, mean_divisor
from ._ownership import check_given_away
from ._rows import DTYPES
from ._softmax_loss_cost import SoftmaxLossShape, cost
from ._softmax_loss_ops import as_matrices, softmax_loss_op

__all__ = ["SoftmaxLossOptions", "SoftmaxLossShape", "cost", "softmax_cross_entropy"]


class SoftmaxLossOptions(TypedDict, total=False):
    """Keyword arguments of `softmax_cross_entropy` that do not change the type of its result; it documents them."""

    ignore_index: int
    reduction: Reduction
    num_items: Tensor | float | None
    token_weight: Tensor | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    overwrite_logits: bool


@overload
def softmax_cross_entropy(
    logits: Tensor, target: Tensor, *, out_lse: Literal[False] = False, **options: Unpack[SoftmaxLossOptions]
) -> Tensor: ...


@overload
def softmax_cross_entropy(
    logits: Tensor, target: Tensor, *, out_lse: Literal[True], **options: Unpack[SoftmaxLossOptions]
) -> tuple[Tensor, Tensor]: ...


def softmax_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    overwrite_logits: bool = False,
    out_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of z = softcap tanh(logit_scale logits / softcap) against `target`, in fp32 inside.

    Args:
        logits: [..., V], any strides: `logits[:, :-1]` costs no copy.
        target: [...] integers. A row out of range is NaN.
        ignore_index: rows with this target cost nothing and get zero gradients.
        reduction: `mean` divides the sum of weighted losses by `num_items`.
        num_items: a number, or a tensor of one element that is not read by the host: the items of the whole step, where
            it is accumulated over micro-batches. Default: rows that are not ignored.
        token_weight: [...], factor of each row's loss; it receives its gradient.
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1.
        z_loss: factor of lse(z) squared.
        softcap: bound of the logits, positive.
        logit_scale: factor of the logits, before the soft cap.
        overwrite_logits: the caller gives the logits away: backward, which then runs once, leaves their gradient in
            their place. An operation that saved them as well fails in its own backward, told by autograd. Under
            `torch.compile`, which plans buffers itself, this is left to it.
        out_lse: also returns log-sum-exp of z.

    Returns:
        The loss in fp32 (fp64 for fp64), a scalar or [...]; with `out_lse` also [...] of the same dtype, detached and 0
        where ignored.

    Raises:
        UsageError: shapes, dtypes, devices or options do not fit together; the logits are not the caller's to give.

    >>> softmax_cross_entropy(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, -100]))
    tensor(0.1269)
    """
    cap = 0.0 if softcap is None else float(softcap)
    terms = LossTerms(ignore_index, float(label_smoothing), float(z_loss), cap, float(logit_scale))
    _check_tensors(logits, target, token_weight)
    check_loss_options(terms, reduction, num_items, has_softcap=softcap is not None)
    overwrites = overwrite_logits and logits.requires_grad and not torch.compiler.is_compiling()
    if overwrites:
        check_given_away("overwrite_logits", logits)
        _check_view(logits)
    rows = target.to(torch.int64).reshape(-1)
    loss, largest, total = softmax_loss_op(logits, rows, *terms, overwrites)
    if token_weight is not None:
        loss = torch.where(rows == ignore_index, 0.0, loss * token_weight.reshape(-1))
    loss = loss.reshape(target.shape) if reduction == "none" else loss.sum()
    if reduction == "mean":
        loss = loss / mean_divisor(rows, ignore_index, num_items, loss)
    if not out_lse:
        return loss
    return loss, (largest + total.log()).reshape(target.shape)


def _check_tensors(logits: Tensor, target: Tensor, token_weight: Tensor | None) -> None:
    if logits.dim() == 0 or logits.shape[-1] == 0 or logits.shape[:-1] != target.shape:
        raise UsageError(
            "softmax_cross_entropy wants logits [..., V] with V > 0 and target [...], found "
            f"{list(logits.shape)} and {list(target.shape)}"
        )
    if logits.dtype not in DTYPES:
        raise UsageError(f"softmax_cross_entropy wants logits of a floating dtype of 16 to 64 bits, not {logits.dtype}")
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise UsageError(f"softmax_cross_entropy wants target of class indices, found {target.dtype}")
    if token_weight is not None and token_weight.shape != target.shape:
        raise UsageError(
            f"softmax_cross_entropy wants token_weight {list(target.shape)}, found {list(token_weight.shape)}"
        )
    devices = {str(t.device) for t in (logits, target, token_weight) if t is not None}
    if len(devices) > 1:
        raise UsageError(f"softmax_cross_entropy wants all tensors on one device, found {', '.join(sorted(devices))}")


def _check_view(logits: Tensor) -> None:
    try:
        as_matrices(logits, must_be_view=True)
    except RuntimeError:
        raise UsageError(
            f"overwrite_logits cannot see the strides {list(logits.stride())} of logits {list(logits.shape)} as three "
            "dimensions; flatten the leading ones before the head, or leave overwrite_logits out"
        ) from None
