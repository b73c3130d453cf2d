"""`pack` and `unpack`: a tensor in a byte for each element, for what leaves the device between forward and backward.

Opt-in, since it loses digits: nothing in this package packs by itself. Blocks of 128 elements have a unit each, so that
an outlier costs its neighbours their digits and nobody else. Label of the action: *changes numerics*.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import DTYPES, compute_dtype
from ._cost import PackShape, cost
from ._ops import pack_op, packer, unpack_op, unpacker
from ._terms import BLOCK_ELEMENTS, CODE_DTYPES

__all__ = [
    "BLOCK_ELEMENTS",
    "PackShape",
    "Packed",
    "cost",
    "error_bound",
    "pack",
    "pack_into",
    "unpack",
    "unpack_into",
]


class Packed(NamedTuple):
    """What is left of a tensor."""

    codes: Tensor
    """[elements], int8 or float8_e4m3fn, row by row."""
    units: Tensor
    """[blocks], fp32 (fp64 of fp64 tensors): what codes of one block are multiplied with; NaN where an element was not
    finite."""
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of codes and units: 1.03 for each element."""
        return self.codes.nbytes + self.units.nbytes

    @property
    def is_finite(self) -> bool:
        """Whether every element was; waits for the device."""
        return not bool(self.units.isnan().any())


def pack(tensor: Tensor, form: Literal["int8", "fp8"] = "int8") -> Packed:
    """The nearest values that a byte can tell apart, and no gradient.

    A block with an element that is not finite becomes NaN as a whole.

    Args:
        tensor: any strides.
        form: `int8` has one step for the whole block, which suits values of one size; `fp8` (e4m3, on every device)
            steps that grow with the value. `error_bound` says what each loses.

    Raises:
        UsageError: the dtype or form is unknown.

    >>> unpack(pack(torch.tensor([1.0, 0.5, -0.003])))
    tensor([1.0000, 0.5039, 0.0000])
    """
    if form not in CODE_DTYPES:
        raise UsageError(f"pack knows the forms {' and '.join(CODE_DTYPES)}, not {form!r}")
    if tensor.dtype not in DTYPES:
        raise UsageError(f"pack wants a floating dtype of 16 to 64 bits, found {tensor.dtype}")
    codes, units = pack_op(tensor.detach(), form)
    return Packed(codes, units, tensor.shape, tensor.dtype)


def unpack(packed: Packed) -> Tensor:
    """The tensor again, contiguous, in its shape and dtype.

    Raises:
        UsageError: codes, units and shape do not fit together.
    """
    _check(packed)
    result: Tensor = unpack_op(packed.codes.contiguous(), packed.units.contiguous(), packed.dtype)
    return result.view(packed.shape)


def pack_into(tensor: Tensor, packed: Packed) -> None:
    """Packs into memory that is there already; for eager code, as no operator of torch's says what is written.

    Args:
        tensor: contiguous, of the shape and dtype that `packed` has.
        packed: contiguous codes, whose dtype says the form, and units; both are overwritten.

    Raises:
        UsageError: they do not fit together.

    >>> tensor = torch.tensor([1.0, 0.5, -0.003])
    >>> packed = Packed(torch.empty(3, dtype=torch.int8), torch.empty(1), tensor.shape, tensor.dtype)
    >>> pack_into(tensor, packed)
    >>> packed.codes
    tensor([127,  64,   0], dtype=torch.int8)
    """
    _check_memory(packed, tensor)
    form = next(form for form, dtype in CODE_DTYPES.items() if dtype == packed.codes.dtype)
    if tensor.numel() > 0:
        packer(tensor)(tensor.detach().view(1, -1), packed.codes, packed.units, form)


def unpack_into(packed: Packed, result: Tensor) -> None:
    """Unpacks into memory that is there already; see `pack_into`.

    Args:
        result: contiguous, of the shape and dtype that `packed` has; overwritten.

    Raises:
        UsageError: they do not fit together.
    """
    _check_memory(packed, result)
    if result.numel() > 0:
        unpacker(result)(packed.codes, packed.units, result.view(-1))


def _check(packed: Packed) -> None:
    num_elements = packed.shape.numel()
    num_blocks = math.ceil(num_elements / BLOCK_ELEMENTS)
    if (
        packed.codes.shape != (num_elements,)
        or packed.units.shape != (num_blocks,)
        or packed.codes.dtype not in CODE_DTYPES.values()
    ):
        raise UsageError(
            f"{list(packed.shape)}, packed, wants {num_elements} codes of int8 or float8_e4m3fn and {num_blocks} "
            f"units, found {packed.codes.dtype} {list(packed.codes.shape)} and {list(packed.units.shape)}"
        )


def _check_memory(packed: Packed, tensor: Tensor) -> None:
    _check(packed)
    parts = (tensor, packed.codes, packed.units)
    if (
        (tensor.shape, tensor.dtype) != (packed.shape, packed.dtype)
        or tensor.dtype not in DTYPES
        or packed.units.dtype != compute_dtype(tensor.dtype)
        or not all(part.is_contiguous() for part in parts)
    ):
        raise UsageError(
            f"memory for {packed.dtype} {list(packed.shape)}, packed, wants a contiguous tensor like that, codes and "
            f"{compute_dtype(packed.dtype)} units, found {tensor.dtype} {list(tensor.shape)} with strides "
            f"{list(tensor.stride())} and {packed.units.dtype} units"
        )


def error_bound(tensor: Tensor, form: Literal["int8", "fp8"] = "int8") -> Tensor:
    """Upper bound of |unpack(pack(t)) - t| for each element of a finite tensor, before the result is rounded.

    int8: half of a step of 1/127 of the block's largest magnitude. fp8: 1/16 of the element, at least half of the
    smallest step, 2^-10 / 448 of the largest. Both with the rounding of fp32, and with what is below its smallest
    normal number times 448, which becomes 0.
    """
    flat = tensor.detach().double().abs().flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    largest = padded.amax(1, keepdim=True)
    step = largest / 254.0 if form == "int8" else torch.maximum(padded / 16.0, largest * 2.0**-10 / 448.0)
    bound = step + largest * 2.0**-22 + 448.0 * torch.finfo(torch.float32).tiny
    return bound.expand_as(padded).flatten()[: flat.numel()].view(tensor.shape)
