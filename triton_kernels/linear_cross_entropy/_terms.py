"""What the losses of the package have in common: the terms of a row's loss, and how rows become one number."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memwall.errors import UsageError

__all__ = ["LossTerms", "Reduction", "check_loss_options", "mean_divisor"]

Reduction = Literal["mean", "sum", "none"]


class LossTerms(NamedTuple):
    """What is summed into the loss of a row; z = softcap tanh(logit_scale logits / softcap) are its logits."""

    ignore_index: int
    label_smoothing: float
    """Share of the target that is spread over the whole vocabulary."""
    z_loss: float
    """Factor of lse(z) squared."""
    softcap: float
    """0 is none."""
    logit_scale: float


def mean_divisor(target: Tensor, ignore_index: int, num_items: Tensor | float | None, loss: Tensor) -> Tensor:
    """What the mean divides by; 1 where all rows are ignored, so that their loss is 0 and not 0 / 0."""
    num_valid = (target != ignore_index).sum()
    if num_items is None:
        return num_valid.clamp(min=1).to(loss.dtype)
    if not isinstance(num_items, Tensor):
        num_items = torch.full((), float(num_items), dtype=loss.dtype, device=loss.device)
    # A tensor of one element, whatever its shape: the loss stays a scalar.
    return torch.where(num_valid == 0, 1.0, num_items.detach().reshape(()).to(loss.dtype))


def check_loss_options(
    terms: LossTerms, reduction: str, num_items: Tensor | float | None, *, has_softcap: bool
) -> None:
    """Raises UsageError for what no loss has."""
    if reduction not in ("mean", "sum", "none"):
        raise UsageError(f"reduction is 'mean', 'sum' or 'none', not {reduction!r}")
    if num_items is not None and reduction != "mean":
        raise UsageError(f"num_items divides the mean, but reduction is {reduction!r}")
    if isinstance(num_items, Tensor) and num_items.numel() != 1:
        raise UsageError(f"num_items is a number or a tensor of one element, found {list(num_items.shape)}")
    if not 0.0 <= terms.label_smoothing <= 1.0:
        raise UsageError(f"label_smoothing is a share between 0 and 1, not {terms.label_smoothing}")
    if has_softcap and terms.softcap <= 0.0:
        raise UsageError(f"softcap bounds the logits and is positive, not {terms.softcap}; None is no bound")
