"""The plain torch half of the norms, which also is the CPU path. fp64 is computed in fp64: the oracle of the tests."""

import torch
from torch import Tensor

from .._rows import row_slices
from ._terms import NormTerms


def reference_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    result: Tensor,
    mean: Tensor,
    rstd: Tensor,
    terms: NormTerms,
) -> None:
    """Normalises rows.

    Args:
        x: [rows, columns], any strides.
        weight: [columns]. bias: [columns].
        result: [rows, columns], written.
        mean: [rows] fp32 (fp64 for fp64), written; empty where nothing is centered.
        rstd: [rows], 1 / sqrt(var + eps), written.
        terms: which norm.
    """
    for part in row_slices(*x.shape):
        values = x[part].to(rstd.dtype)
        if terms.is_centered:
            # What the first sum lost of a common offset is in the differences from it.
            first = values.mean(1)
            mean[part] = first + (values - first.unsqueeze(1)).mean(1)
            values = values - mean[part].unsqueeze(1)
        rstd[part] = torch.rsqrt(values.square().mean(1) + terms.eps)
        values = _normalised(x[part], mean[part], rstd[part], terms)
        if terms.rounds:
            values = values.to(x.dtype).to(rstd.dtype)
        if weight is not None:
            values = values * (weight.to(rstd.dtype) + terms.weight_offset)
        result[part] = values if bias is None else values + bias.to(rstd.dtype)


def _normalised(x: Tensor, mean: Tensor, rstd: Tensor, terms: NormTerms) -> Tensor:
    values = x.to(rstd.dtype)
    if terms.is_centered:
        values = values - mean.unsqueeze(1)
    return values * rstd.unsqueeze(1)


def reference_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    terms: NormTerms,
) -> None:
    """Computes the gradients of `reference_norm`.

    Args:
        grad: [rows, columns], of the result.
        x: what was normalised. weight: [columns]. mean, rstd: [rows], as found in forward.
        grad_x: [rows, columns], written.
        grad_weight: [columns], written; empty if it is not wanted. grad_bias: likewise.
        terms: which norm.
    """
    wide = rstd.dtype
    weight_sum = torch.zeros(grad_weight.shape, dtype=wide, device=x.device)
    bias_sum = torch.zeros(grad_bias.shape, dtype=wide, device=x.device)
    for part in row_slices(*x.shape):
        g = grad[part].to(wide)
        normalised = _normalised(x[part], mean[part], rstd[part], terms)
        if grad_weight.numel() > 0:
            seen = normalised.to(x.dtype).to(wide) if terms.rounds else normalised
            weight_sum += (g * seen).sum(0)
        if grad_bias.numel() > 0:
            bias_sum += g.sum(0)
        if weight is not None:
            g = g * (weight.to(wide) + terms.weight_offset)
        found = g - normalised * (g * normalised).mean(1, keepdim=True)
        if terms.is_centered:
            found -= g.mean(1, keepdim=True)
        found *= rstd[part].unsqueeze(1)
        grad_x[part] = found
    grad_weight.copy_(weight_sum)
    grad_bias.copy_(bias_sum)
