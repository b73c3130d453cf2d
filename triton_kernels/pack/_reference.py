"""The plain torch half of packing, which also is the CPU path: the kernels' bits."""

import torch
from torch import Tensor

from ._terms import BLOCK_ELEMENTS, LEVELS, SMALLEST_UNIT

# Worked on at a time: 512 KiB of fp32 stay in a core's cache between the passes over them.
_SLICE_BLOCKS = 1024


def reference_pack(flat: Tensor, codes: Tensor, units: Tensor) -> None:
    """Fills `codes` [elements] and `units` [blocks] for `flat` [elements]."""
    num_whole = flat.numel() // BLOCK_ELEMENTS
    whole = num_whole * BLOCK_ELEMENTS
    values, packed = flat[:whole].view(-1, BLOCK_ELEMENTS), codes[:whole].view(-1, BLOCK_ELEMENTS)
    scratch = units.new_empty(min(num_whole, _SLICE_BLOCKS), BLOCK_ELEMENTS)
    for begin in range(0, num_whole, _SLICE_BLOCKS):
        part = slice(begin, min(begin + _SLICE_BLOCKS, num_whole))
        _pack_blocks(values[part], packed[part], units[part], scratch[: part.stop - begin])
    if whole < flat.numel():
        last = units.new_zeros(1, BLOCK_ELEMENTS)
        last[0, : flat.numel() - whole] = flat[whole:]
        last_codes = codes.new_empty(1, BLOCK_ELEMENTS)
        _pack_blocks(last, last_codes, units[num_whole:], torch.empty_like(last))
        codes[whole:] = last_codes[0, : flat.numel() - whole]


def _pack_blocks(values: Tensor, codes: Tensor, units: Tensor, scratch: Tensor) -> None:
    """Packs whole blocks [blocks, block]; `scratch` is as large, in the dtype of `units`."""
    if values.dtype != scratch.dtype:
        values = scratch.copy_(values)
    largest = _largest(values)
    is_bad = None
    if not largest.isfinite().all():
        is_finite = values.isfinite()
        is_bad = ~is_finite.all(1)
        values = torch.where(is_finite, values, 0.0)
        largest = _largest(values)
    unit = largest.div_(LEVELS)
    unit.mul_(unit >= SMALLEST_UNIT)
    # No element is further from 0 than the largest code, up to a rounding that the conversion takes back.
    torch.mul(values, (1.0 / torch.where(unit > 0.0, unit, 1.0)).unsqueeze(1), out=scratch)
    codes.copy_(scratch.round_())
    units.copy_(unit if is_bad is None else unit.masked_fill_(is_bad, torch.nan))


def _largest(values: Tensor) -> Tensor:
    """Returns the largest magnitude in each block. torch (2.13) is fastest at two passes that store nothing."""
    return torch.maximum(values.amax(1), -values.amin(1))


def reference_unpack(codes: Tensor, units: Tensor, result: Tensor) -> None:
    """Fills `result [elements]` with codes times the units of their blocks, rounded once."""
    num_whole = codes.numel() // BLOCK_ELEMENTS
    whole = num_whole * BLOCK_ELEMENTS
    packed, values = codes[:whole].view(-1, BLOCK_ELEMENTS), result[:whole].view(-1, BLOCK_ELEMENTS)
    scratch = units.new_empty(min(num_whole, _SLICE_BLOCKS), BLOCK_ELEMENTS)
    for begin in range(0, num_whole, _SLICE_BLOCKS):
        part = slice(begin, min(begin + _SLICE_BLOCKS, num_whole))
        wide = scratch[: part.stop - begin].copy_(packed[part])
        torch.mul(wide, units[part].unsqueeze(1), out=values[part])
    if whole < codes.numel():
        result[whole:] = codes[whole:].to(units.dtype) * units[num_whole:]
