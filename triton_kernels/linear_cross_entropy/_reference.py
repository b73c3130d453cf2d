"""The plain torch half of `linear_cross_entropy`: what each row of logits costs, and its gradient. Also the CPU path.

It works in place on a slab of logits, slice by slice, so that the CPU keeps the promise too: logits never whole, and
temporaries that do not grow with the vocabulary. fp64 logits are computed in fp64: the oracle of the kernel's tests.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .._rows import row_slices
from ._terms import LossTerms


class Rows(NamedTuple):
    """Holds rows of logits, and where what is found of them goes."""

    logits: Tensor
    """[rows, V], row stride at least V; overwritten by the gradient, rounded once, if one is asked for."""
    target: Tensor
    """[rows] int64. Rows of `ignore_index` get zeros everywhere, rows out of range NaN."""
    coefficient: Tensor
    """[rows], fp32 (fp64 for fp64 logits)."""
    loss: Tensor
    """[rows], written."""


def reference_row_loss(rows: Rows, terms: LossTerms, *, writes_gradient: bool) -> None:
    """Computes the loss of each row times its coefficient, and the gradient of that in place of the logits.

    Args:
        rows: what is read and written.
        terms: what the loss consists of.
        writes_gradient: for an evaluation it is not.
    """
    for part in row_slices(*rows.logits.shape):
        _row_loss(Rows(*(tensor[part] for tensor in rows)), terms, writes_gradient=writes_gradient)


def _row_loss(rows: Rows, terms: LossTerms, *, writes_gradient: bool) -> None:
    logits, target, coefficient, loss = rows
    vocabulary = logits.shape[1]
    is_ignored = target == terms.ignore_index
    is_valid = (target >= 0) & (target < vocabulary)
    index = torch.where(is_valid, target, 0).unsqueeze(1)
    coefficient = torch.where(is_valid, coefficient, float("nan"))
    z = _scaled(logits, coefficient.dtype, terms)
    picked = z.gather(1, index).squeeze(1)
    # Sums of logits are taken from here: what all of them have in common must not drown the differences.
    origin = picked.masked_fill(picked == float("-inf"), 0.0)
    mean = (z - origin.unsqueeze(1)).mean(1) if terms.label_smoothing > 0.0 else None
    slope = 1.0 - (z / terms.softcap).square() if terms.softcap > 0.0 and writes_gradient else None
    shift = z.amax(1)
    shift.masked_fill_(shift == float("-inf"), 0.0)
    gradient = z.sub_(shift.unsqueeze(1)).exp_()
    total = gradient.sum(1)
    # Beside logits of 10,000 an lse in fp32 is exact to a thousandth only: loss and p are taken from its two parts.
    log_total = total.log()
    row_loss = (1.0 - terms.label_smoothing) * ((shift - picked) + log_total)
    if mean is not None:
        row_loss += terms.label_smoothing * ((shift - origin) + log_total - mean)
    loss.copy_(torch.where(is_ignored, 0.0, row_loss * coefficient))
    if not writes_gradient:
        return
    gradient *= (1.0 / total).unsqueeze(1)
    if terms.label_smoothing > 0.0:
        gradient -= terms.label_smoothing / vocabulary
    gradient.scatter_add_(1, index, gradient.new_full(index.shape, terms.label_smoothing - 1.0))
    if slope is not None:
        gradient *= slope
    gradient *= (coefficient * terms.logit_scale).unsqueeze(1)
    logits.copy_(gradient.masked_fill_(is_ignored.unsqueeze(1), 0.0))


def _scaled(logits: Tensor, dtype: torch.dtype, terms: LossTerms) -> Tensor:
    """Returns the logits that the loss sees, in a new tensor."""
    z = logits.to(dtype, copy=True)
    if terms.logit_scale != 1.0:
        z *= terms.logit_scale
    if terms.softcap > 0.0:
        z = z.div_(terms.softcap).tanh_().mul_(terms.softcap)
    return z
