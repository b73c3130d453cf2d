"""The plain torch half of `adamw_8bit_`, which is the CPU path too: operation by operation the kernel's bits."""

import torch
from torch import Tensor

from .._rows import row_slices
from ._terms import BLOCK_ELEMENTS, MOMENT_LEVELS, ROOT_CEILING, ROOT_LEVELS, Moments, Scalars


def reference_adamw_8bit(param: Tensor, grad: Tensor, moments: Moments, scalars: Scalars) -> None:
    """Steps one parameter in place.

    Args:
        param: [elements], fp32 or 16 bits.
        grad: [elements], likewise.
        moments: of the parameter; written.
        scalars: of the step.
    """
    # Slices begin where blocks do.
    for part in row_slices(param.numel(), 1):
        _step_slice(param[part], grad[part], _part_of(moments, part), scalars)


def _part_of(moments: Moments, part: slice) -> Moments:
    blocks = slice(part.start // BLOCK_ELEMENTS, -(-part.stop // BLOCK_ELEMENTS))
    return Moments(*(codes[part] for codes in moments[:2]), *(units[blocks] for units in moments[2:]))


def _step_slice(param: Tensor, grad: Tensor, moments: Moments, scalars: Scalars) -> None:
    gradient = grad.float()
    first = moments.first.float() * _spread(moments.first_units, param.numel())
    root = moments.root.float().square() * _spread(moments.root_units, param.numel())
    first = first + (gradient - first) * scalars.first_share
    second = root * root * scalars.second_decay + gradient * gradient * scalars.second_share
    root = _square_root(second)
    deviation = root * scalars.root_factor + scalars.eps
    param.copy_(param.float() * scalars.decay - first / deviation * scalars.step_size)
    codes, units = _quantised(first, MOMENT_LEVELS)
    moments.first.copy_(torch.round(codes))
    moments.first_units.copy_(units)
    squares, units = _quantised(root, ROOT_LEVELS**2)
    codes = _square_root(squares)
    moments.root.copy_(torch.where(codes < ROOT_CEILING, torch.ceil(codes), torch.round(codes)))
    moments.root_units.copy_(units)


def _square_root(values: Tensor) -> Tensor:
    """Returns correctly rounded roots: torch's own in fp32 are a vector library's, which may be off by one ulp."""
    return values.double().sqrt().float()


def _spread(units: Tensor, num_elements: int) -> Tensor:
    """Returns the unit of each element."""
    return units.repeat_interleave(BLOCK_ELEMENTS)[:num_elements]


def _quantised(values: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
    """Returns values in units of their block, not yet rounded, and each block's unit: largest magnitude / levels."""
    padding = -values.numel() % BLOCK_ELEMENTS
    blocks = torch.nn.functional.pad(values, (0, padding)).view(-1, BLOCK_ELEMENTS)
    is_number = blocks == blocks
    units = torch.where(is_number, blocks.abs(), 0.0).amax(1) / num_levels
    codes = blocks * (1.0 / torch.where(units > 0.0, units, 1.0)).unsqueeze(1)
    # A block with NaN is NaN when it is read again, whatever its codes are.
    codes = torch.where(codes == codes, codes, 0.0).clamp(-num_levels, num_levels)
    units = torch.where(is_number.all(1), units, torch.nan)
    return codes.view(-1)[: values.numel()], units
