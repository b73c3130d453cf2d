"""The plain torch half of `pack` and `unpack`, which also is the CPU path: the kernels' bits."""

import torch
from torch import Tensor

from ._pack_terms import BLOCK_ELEMENTS, LEVELS, SMALLEST_UNIT
from ._rows import row_slices

__all__ = ["reference_pack", "reference_unpack"]


def reference_pack(tensor: Tensor, codes: Tensor, units: Tensor, form: str) -> None:
    """Fills `codes` and `units`.

    Args:
        tensor: [rows, columns]; copied where it is not contiguous.
        codes: [elements], int8 or float8_e4m3fn.
        units: [blocks], fp32, or fp64 of an fp64 tensor.
        form: int8 or fp8.
    """
    flat, levels = tensor.reshape(-1), LEVELS[form]
    for part in row_slices(flat.numel(), 1):
        values = flat[part].to(units.dtype)
        padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
        is_finite = padded.isfinite()
        unit = torch.where(is_finite, padded.abs(), 0.0).amax(1) / levels
        unit = torch.where(unit >= SMALLEST_UNIT, unit, 0.0)
        scaled = padded * (1.0 / torch.where(unit > 0.0, unit, 1.0)).unsqueeze(1)
        scaled = torch.where(is_finite, scaled, 0.0).clamp_(-levels, levels).view(-1)[: values.numel()]
        codes[part] = scaled.round().to(torch.int8) if form == "int8" else scaled.to(codes.dtype)
        blocks = slice(part.start // BLOCK_ELEMENTS, part.start // BLOCK_ELEMENTS + unit.numel())
        units[blocks] = torch.where(is_finite.all(1), unit, torch.nan)


def reference_unpack(codes: Tensor, units: Tensor, result: Tensor) -> None:
    """Fills `result [elements]` with codes times the units of their blocks, rounded once."""
    for part in row_slices(codes.numel(), 1):
        taken = codes[part]
        begin = part.start // BLOCK_ELEMENTS
        unit = units[begin : begin + -(-taken.numel() // BLOCK_ELEMENTS)]
        result[part] = taken.to(units.dtype) * unit.repeat_interleave(BLOCK_ELEMENTS)[: taken.numel()]
