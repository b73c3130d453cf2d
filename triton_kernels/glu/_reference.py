"""The plain torch half of `glu`, which also is the CPU path. fp64 is computed in fp64: the oracle of the tests."""

import math

import torch
from torch import Tensor

from .._rows import compute_dtype, row_slices


def _share(gate: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Returns the factor that activates the gate, and the derivative of that."""
    if kind == "silu":
        share = torch.sigmoid(gate)
        return share, share * torch.sigmoid(-gate)
    if kind == "gelu_tanh":
        factor = math.sqrt(8.0 / math.pi)
        argument = factor * (gate + 0.044715 * gate**3)
        # Both from the same function: a difference from 1 has no digits left in the tail.
        share, rest = torch.sigmoid(argument), torch.sigmoid(-argument)
        return share, share * rest * (factor * (1.0 + 3.0 * 0.044715 * gate * gate))
    share = 0.5 * (1.0 + torch.erf(gate * math.sqrt(0.5)))
    return share, torch.exp(-0.5 * gate * gate) / math.sqrt(2.0 * math.pi)


def reference_glu(gate: Tensor, up: Tensor, product: Tensor, kind: str) -> None:
    """Fills `product` with activation(gate) * up; all [rows, columns], any strides and floating dtypes."""
    wide = compute_dtype(product.dtype)
    for part in row_slices(*gate.shape):
        wide_gate = gate[part].to(wide)
        share, _ = _share(wide_gate, kind)
        product[part] = wide_gate * share * up[part].to(wide)


def reference_glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, grad_gate: Tensor, grad_up: Tensor, kind: str
) -> None:
    """Fills the gradients of gate and up for `grad`, that of the product; all [rows, columns]."""
    wide = compute_dtype(grad.dtype)
    for part in row_slices(*gate.shape):
        wide_grad, wide_gate = grad[part].to(wide), gate[part].to(wide)
        share, slope = _share(wide_gate, kind)
        grad_gate[part] = wide_grad * up[part].to(wide) * (share + wide_gate * slope)
        grad_up[part] = wide_grad * (wide_gate * share)
