"""`pack_into` and `unpack_into`: a tensor in a byte for each element, for what leaves the device until backward.

Opt-in, since it loses digits: nothing in this package packs by itself. Blocks of 128 elements have a unit each, so that
an outlier costs its neighbours their digits and nobody else. Label of the action: *changes numerics*. Both are for
eager code: no operator of torch's says what they write.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._launch import half_for
from ._terms import BLOCK_ELEMENTS

__all__ = ["BLOCK_ELEMENTS", "Packed", "pack", "pack_into", "unpack_into"]


class Packed(NamedTuple):
    """Holds what is left of a tensor."""

    codes: Tensor
    """[elements], int8: from -127 to 127."""
    units: Tensor
    """[blocks] fp32: what codes of one block are multiplied with; NaN where an element was not finite."""

    @property
    def is_finite(self) -> bool:
        """Tells whether every element was; waits for the device."""
        return not bool(self.units.isnan().any())


def pack(tensor: Tensor) -> Packed:
    """Returns the nearest values that a byte can tell apart; arguments and errors are those of `pack_into`.

    Args:
        tensor: contiguous, fp32 or 16 bits.

    >>> pack(torch.tensor([1.0, 0.5, -0.003])).codes
    tensor([127,  64,   0], dtype=torch.int8)
    """
    codes = torch.empty(tensor.numel(), dtype=torch.int8, device=tensor.device)
    units = torch.empty(-(-tensor.numel() // BLOCK_ELEMENTS), dtype=torch.float32, device=tensor.device)
    packed = Packed(codes, units)
    pack_into(tensor, packed)
    return packed


def pack_into(tensor: Tensor, packed: Packed) -> None:
    """Packs into memory that is there already. A block with an element that is not finite becomes NaN as a whole.

    Args:
        tensor: contiguous, fp32 or 16 bits.
        packed: contiguous codes, as many as elements, and units; both are overwritten.

    Raises:
        UsageError: they do not fit together.
    """
    _check(tensor, packed)
    if tensor.numel() > 0:
        half_for(tensor, __package__, "pack")(tensor.detach().view(-1), *packed)


def unpack_into(packed: Packed, result: Tensor) -> None:
    """Unpacks into `result`, which is contiguous and overwritten; errors are those of `pack_into`."""
    _check(result, packed)
    if result.numel() > 0:
        half_for(result, __package__, "unpack")(*packed, result.view(-1))


def _check(tensor: Tensor, packed: Packed) -> None:
    codes, units = packed
    num_elements, num_blocks = tensor.numel(), -(-tensor.numel() // BLOCK_ELEMENTS)
    if (
        (codes.shape, units.shape) != ((num_elements,), (num_blocks,))
        or codes.dtype != torch.int8
        or units.dtype != torch.float32
        or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or not all(part.is_contiguous() for part in (tensor, codes, units))
    ):
        raise UsageError(
            f"a packed tensor of {num_elements} elements wants contiguous memory of 16 or 32 bits, as many codes "
            f"of int8 and {num_blocks} float32 units, found {tensor.dtype} with strides "
            f"{list(tensor.stride())}, {codes.dtype} {list(codes.shape)} and {units.dtype} {list(units.shape)}"
        )
