"""`linear_cross_entropy`: the loss of a language model from hidden states and head, without ever holding its logits.

Logits exist for `chunk_rows` rows at a time: `chunk_rows_for` takes that number from the memory that is free, and
`cost` says how the slab's bytes trade against reading the head once per chunk. The reference that runs on the CPU and
the Triton kernel share one loop, _chunks.py. Label of the action: *equivalent*; with
`accum_dtype` of 16 bits and more than one chunk it *changes numerics*.
"""

from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import DTYPES
from ._chunks import LossCall
from ._cost import LossShape, chunk_rows_for, cost
from ._ops import rows_op, sum_op
from ._terms import Reduction, check_loss_options, mean_divisor

__all__ = ["DEFAULT_CHUNK_ROWS", "LossOptions", "LossShape", "chunk_rows_for", "cost", "linear_cross_entropy"]

DEFAULT_CHUNK_ROWS = 1024
"""Where nobody chose: a constant, since a chunk taken from free memory would change rounding from run to run."""


class LossOptions(TypedDict, total=False):
    """Keyword arguments of `linear_cross_entropy` that do not change the type of its result; it documents them."""

    bias: Tensor | None
    ignore_index: int
    reduction: Reduction
    num_items: Tensor | float | None
    token_weight: Tensor | None
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    chunk_rows: int
    max_valid_rows: int | None
    recompute: bool
    accum_dtype: torch.dtype


@overload
def linear_cross_entropy(
    x: Tensor, w: Tensor, target: Tensor, *, out_lse: Literal[False] = False, **options: Unpack[LossOptions]
) -> Tensor: ...


@overload
def linear_cross_entropy(
    x: Tensor, w: Tensor, target: Tensor, *, out_lse: Literal[True], **options: Unpack[LossOptions]
) -> tuple[Tensor, Tensor]: ...


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    num_items: Tensor | float | None = None,
    token_weight: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
    max_valid_rows: int | None = None,
    recompute: bool = False,
    accum_dtype: torch.dtype = torch.float32,
    out_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cross entropy of z = softcap tanh(logit_scale (x w^T + bias) / softcap) against `target`.

    Gradients are computed for whichever of x, w and bias require them, in the same pass as the loss; with
    `reduction="none"` or `recompute` in backward instead, from logits that are computed again.

    Args:
        x: [M, H], any strides. Under autocast cast like the input of a linear layer, and so are w and bias.
        w: [V, H], any strides; neither row- nor column-major ones cost a copy.
        target: [M] integers. A row out of range is NaN.
        bias: [V].
        ignore_index: rows with this target cost nothing and get zero gradients.
        reduction: `mean` divides the sum of weighted losses by `num_items`.
        num_items: a number, or a tensor of one element that is not read by the host: the items of the whole step, where
            it is accumulated over micro-batches. Default: rows that are not ignored.
        token_weight: [M], factor of each row's loss; a constant, it receives no gradient.
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1.
        z_loss: factor of lse(z) squared.
        softcap: bound of the logits, positive.
        logit_scale: factor of the logits, before the soft cap.
        chunk_rows: rows whose logits exist at a time.
        max_valid_rows: upper bound of the rows that are not ignored, e.g. from the collator. With it ignored rows are
            left out of the matmul, without asking the device how many there are; if it was too small, the loss is
            NaN. The CPU counts for itself.
        recompute: keeps the inputs until backward instead of gradients, for 8 M H V FLOPs in place of 6.
        accum_dtype: fp32, or the head's own dtype to halve the buffer in which chunks are added to its gradient.
        out_lse: also returns log-sum-exp of z.

    Returns:
        The loss in fp32 (fp64 for fp64), a scalar or [M]; with `out_lse` also [M] of the same dtype, detached and 0
        where ignored.

    Raises:
        UsageError: shapes, dtypes, devices or options do not fit together.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, bias = x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)
    does_grad = torch.is_grad_enabled()
    call = LossCall(
        x,
        w,
        target,
        bias,
        token_weight,
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        0.0 if softcap is None else float(softcap),
        float(logit_scale),
        chunk_rows,
        max_valid_rows,
        accum_dtype,
        want_x=does_grad and x.requires_grad,
        want_w=does_grad and w.requires_grad,
        want_bias=does_grad and bias is not None and bias.requires_grad,
    )
    _check_tensors(call)
    _check_options(call, reduction, num_items, has_softcap=softcap is not None)
    call = call._replace(target=target.to(torch.int64))
    if reduction == "none" or recompute:
        loss, lse = rows_op(*call)
        loss = loss if reduction == "none" else loss.sum()
    else:
        loss, lse, *_ = sum_op(*call)
    if reduction == "mean":
        loss = loss / mean_divisor(target, ignore_index, num_items, loss)
    return (loss, lse.detach()) if out_lse else loss


def _check_tensors(call: LossCall) -> None:
    x, w, target, bias, token_weight = call.tensors
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1] or w.shape[0] == 0:
        raise UsageError(
            f"linear_cross_entropy wants x [M, H] and w [V, H] with V > 0, found {list(x.shape)} and {list(w.shape)}; "
            "flatten batch and sequence: x.reshape(-1, x.shape[-1])"
        )
    if x.dtype not in DTYPES or any(t is not None and t.dtype != x.dtype for t in (w, bias)):
        found = ", ".join(str(t.dtype) for t in (x, w, bias) if t is not None)
        raise UsageError(
            f"linear_cross_entropy wants x, w and bias of one floating dtype, found {found}; cast them, or use autocast"
        )
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise UsageError(f"linear_cross_entropy wants target of class indices, found {target.dtype}")
    for name, tensor, length in (("target", target, x.shape[0]), ("token_weight", token_weight, x.shape[0]),
                                 ("bias", bias, w.shape[0])):  # fmt: skip
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != length):
            raise UsageError(f"linear_cross_entropy wants {name} [{length}], found {list(tensor.shape)}")
    devices = {str(t.device) for t in call.tensors if t is not None}
    if len(devices) > 1:
        raise UsageError(f"linear_cross_entropy wants all tensors on one device, found {', '.join(sorted(devices))}")
    if token_weight is not None and token_weight.requires_grad:
        raise UsageError(
            'linear_cross_entropy gives token_weight no gradient; use reduction="none" and multiply the result'
        )


def _check_options(call: LossCall, reduction: str, num_items: Tensor | float | None, *, has_softcap: bool) -> None:
    check_loss_options(call.terms, reduction, num_items, has_softcap=has_softcap)
    if call.chunk_rows < 1:
        raise UsageError(f"chunk_rows is at least 1, not {call.chunk_rows}")
    if call.max_valid_rows is not None and call.max_valid_rows < 0:
        raise UsageError(f"max_valid_rows is a number of rows, not {call.max_valid_rows}")
    if call.accum_dtype not in (torch.float32, call.w.dtype):
        raise UsageError(f"accum_dtype is torch.float32 or the head's {call.w.dtype}, not {call.accum_dtype}")
