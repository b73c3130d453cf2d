"""The plain torch half of the norm, which also is the CPU path. fp64 is computed in fp64: the oracle of the tests."""

import torch
from torch import Tensor

from .._rows import row_slices
from ._terms import NormTerms


def reference_norm(x: Tensor, weight: Tensor | None, result: Tensor, rstd: Tensor, terms: NormTerms) -> None:
    """Normalises rows.

    Args:
        x: [rows, columns], any strides.
        weight: [columns].
        result: [rows, columns], written.
        rstd: [rows], 1 / sqrt(mean square + eps) in fp32 (fp64 for fp64), written.
        terms: which norm.
    """
    for part in row_slices(*x.shape):
        values = x[part].to(rstd.dtype)
        rstd[part] = torch.rsqrt(values.square().mean(1) + terms.eps)
        values = values * rstd[part].unsqueeze(1)
        if terms.rounds:
            values = values.to(x.dtype).to(rstd.dtype)
        if weight is not None:
            values = values * (weight.to(rstd.dtype) + terms.weight_offset)
        result[part] = values


def reference_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor,
    terms: NormTerms,
) -> None:
    """Computes the gradients of `reference_norm`.

    Args:
        grad: [rows, columns], of the result.
        x: what was normalised. weight: [columns]. rstd: [rows], as found in forward.
        grad_x: [rows, columns], written.
        grad_weight: [columns], written; empty if it is not wanted.
        terms: which norm.
    """
    wide = rstd.dtype
    weight_sum = torch.zeros(grad_weight.shape, dtype=wide, device=x.device)
    for part in row_slices(*x.shape):
        g = grad[part].to(wide)
        normalised = x[part].to(wide) * rstd[part].unsqueeze(1)
        if grad_weight.numel() > 0:
            seen = normalised.to(x.dtype).to(wide) if terms.rounds else normalised
            weight_sum += (g * seen).sum(0)
        if weight is not None:
            g = g * (weight.to(wide) + terms.weight_offset)
        found = g - normalised * (g * normalised).mean(1, keepdim=True)
        grad_x[part] = found * rstd[part].unsqueeze(1)
    grad_weight.copy_(weight_sum)
