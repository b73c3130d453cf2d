"""`linear_cross_entropy`: the loss of a language model from hidden states and head, without ever holding its logits.

Logits exist for `chunk_rows` rows at a time: `chunk_rows_for` takes that number from the memory that is free. The
reference that runs on the CPU and the Triton kernel share one loop, _chunks.py. Label of the action: *equivalent*.
"""

from typing import Literal

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import DTYPES
from ._chunks import LossCall
from ._ops import rows_op, sum_op

DEFAULT_CHUNK_ROWS = 1024
"""Rows at a time where nobody chose: a constant, as one taken from free memory would change rounding between runs."""


def linear_cross_entropy(
    x: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> Tensor:
    """Returns the cross entropy of z = softcap tanh(logit_scale (x w^T + bias) / softcap) against `target`.

    Gradients are computed for whichever of x, w and bias require them, in the same pass as the loss; with
    `reduction="none"` in backward instead, from logits that are computed again.

    Args:
        x: [M, H], any strides. Under autocast cast like the input of a linear layer, and so are w and bias.
        w: [V, H], any strides; neither row- nor column-major ones cost a copy.
        target: [M] integers. A row out of range is NaN.
        bias: [V].
        ignore_index: rows with this target cost nothing and get zero gradients.
        reduction: `mean` divides the sum by the number of rows that are not ignored, and is 0 where all are.
        label_smoothing: share of the target that is spread over the vocabulary, 0 to 1.
        softcap: bound of the logits, positive.
        logit_scale: factor of the logits, before the soft cap.
        chunk_rows: rows whose logits exist at a time.

    Returns:
        The loss in fp32 (fp64 for fp64), a scalar or [M].

    Raises:
        UsageError: shapes, dtypes, devices or options do not fit together.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, bias = x.to(dtype), w.to(dtype), None if bias is None else bias.to(dtype)
    _check_tensors(x, w, target, bias)
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing is a share between 0 and 1, not {label_smoothing}")
    if softcap is not None and softcap <= 0.0:
        raise UsageError(f"softcap bounds the logits and is positive, not {softcap}; None is no bound")
    if chunk_rows < 1:
        raise UsageError(f"chunk_rows is at least 1, not {chunk_rows}")
    does_grad = torch.is_grad_enabled()
    call = LossCall(
        x,
        w,
        target.to(torch.int64),
        bias,
        ignore_index,
        float(label_smoothing),
        0.0 if softcap is None else float(softcap),
        float(logit_scale),
        chunk_rows,
        want_x=does_grad and x.requires_grad,
        want_w=does_grad and w.requires_grad,
        want_bias=does_grad and bias is not None and bias.requires_grad,
    )
    if reduction == "none":
        rows: Tensor = rows_op(*call)
        return rows
    loss: Tensor
    loss, *_ = sum_op(*call)
    return loss if reduction == "sum" else loss / (target != ignore_index).sum().clamp(min=1).to(loss.dtype)


def _check_tensors(x: Tensor, w: Tensor, target: Tensor, bias: Tensor | None) -> None:
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
    for name, tensor, length in (("target", target, x.shape[0]), ("bias", bias, w.shape[0])):
        if tensor is not None and (tensor.dim() != 1 or tensor.shape[0] != length):
            raise UsageError(f"linear_cross_entropy wants {name} [{length}], found {list(tensor.shape)}")
    devices = {str(t.device) for t in (x, w, target, bias) if t is not None}
    if len(devices) > 1:
        raise UsageError(f"linear_cross_entropy wants all tensors on one device, found {', '.join(sorted(devices))}")
