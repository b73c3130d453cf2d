"""The plain torch half of `softmax_cross_entropy`, which also is the CPU path. fp64 is computed in fp64: the oracle.

It works slice by slice, so that temporaries do not grow with the logits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ._loss_terms import LossTerms
from ._rows import row_slices

__all__ = ["RowSums", "reference_softmax_gradient", "reference_softmax_loss"]


class RowSums(NamedTuple):
    """What forward finds of each row for backward; fp32 (fp64 for fp64 logits).

    Two numbers, not their lse: beside logits of 10,000 that is exact to a thousandth only.
    """

    largest: Tensor
    """[rows], the largest of the scaled logits; 0 for rows that are ignored."""
    total: Tensor
    """[rows], the sum of exp(logit - largest); 1 for rows that are ignored."""


def reference_softmax_loss(logits: Tensor, target: Tensor, loss: Tensor, sums: RowSums, terms: LossTerms) -> None:
    """Loss of each row, 0 where it is ignored and NaN where its target is out of range.

    Args:
        logits: [outer, inner, V], any strides.
        target: [outer * inner] int64.
        loss: [outer * inner], written.
        sums: alike, written.
        terms: what the loss consists of.
    """
    for part, rows in _slices(logits):
        index, is_ignored, is_valid = _target(target[part], rows.shape[1], terms)
        z, _ = _scaled(rows, loss.dtype, terms)
        picked = z.gather(1, index).squeeze(1)
        # Sums of logits are taken from here: what all of them have in common must not drown the differences.
        origin = picked.masked_fill(picked == float("-inf"), 0.0)
        mean = (z - origin.unsqueeze(1)).mean(1) if terms.label_smoothing > 0.0 else None
        shift = z.amax(1)
        shift.masked_fill_(shift == float("-inf"), 0.0)
        total = z.sub_(shift.unsqueeze(1)).exp_().sum(1)
        log_total = total.log()
        row_loss = (1.0 - terms.label_smoothing) * ((shift - picked) + log_total)
        if mean is not None:
            row_loss += terms.label_smoothing * ((shift - origin) + log_total - mean)
        if terms.z_loss != 0.0:
            row_loss += terms.z_loss * (shift + log_total).square()
        loss[part] = torch.where(is_valid, row_loss, float("nan")).masked_fill_(is_ignored, 0.0)
        sums.largest[part] = shift.masked_fill_(is_ignored, 0.0)
        sums.total[part] = total.masked_fill_(is_ignored, 1.0)


def reference_softmax_gradient(
    upstream: Tensor, logits: Tensor, target: Tensor, sums: RowSums, result: Tensor, terms: LossTerms
) -> None:
    """Gradient of the rows' losses for `upstream`, that of each row, into `result`, which may be the logits."""
    vocabulary = logits.shape[2]
    results = (rows for _, rows in _slices(result))
    for (part, rows), into in zip(_slices(logits), results, strict=True):
        index, is_ignored, is_valid = _target(target[part], vocabulary, terms)
        shift, total = sums.largest[part], sums.total[part]
        coefficient = torch.where(is_valid, upstream[part].to(total.dtype), float("nan"))
        z, slope = _scaled(rows, total.dtype, terms, wants_slope=True)
        gradient = z.sub_(shift.unsqueeze(1)).exp_().div_(total.unsqueeze(1))
        # Added last: it must not drown in p - 1.
        penalty = None
        if terms.z_loss != 0.0:
            penalty = gradient * (2.0 * terms.z_loss * (shift + total.log())).unsqueeze(1)
        if terms.label_smoothing > 0.0:
            gradient -= terms.label_smoothing / vocabulary
        gradient.scatter_add_(1, index, gradient.new_full(index.shape, terms.label_smoothing - 1.0))
        if penalty is not None:
            gradient += penalty
        if slope is not None:
            gradient *= slope
        gradient *= (coefficient * terms.logit_scale).unsqueeze(1)
        into.copy_(gradient.masked_fill_(is_ignored.unsqueeze(1), 0.0))


def _slices(logits: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Rows that are worked on at a time, and which of all they are."""
    num_inner = logits.shape[1]
    for outer, rows in enumerate(logits):
        for part in row_slices(*rows.shape):
            taken = rows[part]
            begin = outer * num_inner + part.start
            yield slice(begin, begin + taken.shape[0]), taken


def _target(target: Tensor, vocabulary: int, terms: LossTerms) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [rows, 1] that exist, which rows are ignored, and which have a target within range."""
    is_valid = (target >= 0) & (target < vocabulary)
    return torch.where(is_valid, target, 0).unsqueeze(1), target == terms.ignore_index, is_valid


def _scaled(
    logits: Tensor, dtype: torch.dtype, terms: LossTerms, *, wants_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The logits that the loss sees, in a new tensor, and the derivative of their soft cap."""
    z = logits.to(dtype, copy=True)
    if terms.logit_scale != 1.0:
        z *= terms.logit_scale
    if terms.softcap == 0.0:
        return z, None
    z = z.div_(terms.softcap).tanh_()
    slope = 1.0 - z.square() if wants_slope else None
    return z.mul_(terms.softcap), slope
