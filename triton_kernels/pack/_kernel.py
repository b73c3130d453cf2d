"""The Triton half of packing. Needs triton.

Nothing is fused: the CPU's reference gives the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._configs import pack_launch
from .._launch import is_interpreting, on_device, warp_size
from .._store import nearest_integers, store_rounded
from ._terms import BLOCK_ELEMENTS, LEVELS, SMALLEST_UNIT

_UNIT = tl.constexpr(BLOCK_ELEMENTS)
_SMALLEST_UNIT = tl.constexpr(SMALLEST_UNIT)


@triton.jit
def pack_kernel(
    x_ptr,
    codes_ptr,
    units_ptr,
    num_elements,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Makes codes of several blocks, and their units."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK // _UNIT)
    elements = begin + lanes[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    mask = elements < num_elements
    values = tl.load(x_ptr + elements, mask=mask, other=0.0).to(tl.float32)
    is_finite = tl.abs(values) < float("inf")
    largest = tl.max(tl.where(is_finite, tl.abs(values), 0.0), 1)
    units = tl.div_rn(largest, tl.zeros_like(largest) + LEVELS)
    units = tl.where(units >= _SMALLEST_UNIT, units, 0.0)
    inverses = tl.div_rn(tl.zeros_like(units) + 1.0, tl.where(units > 0.0, units, 1.0))
    scaled = tl.where(is_finite, values * inverses[:, None], 0.0)
    scaled = tl.maximum(tl.minimum(scaled, LEVELS), -LEVELS)
    tl.store(codes_ptr + elements, nearest_integers(scaled).to(tl.int8), mask=mask)
    num_bad = tl.max((is_finite == 0).to(tl.int32), 1)
    blocks = begin // _UNIT + lanes
    tl.store(units_ptr + blocks, tl.where(num_bad > 0, float("nan"), units), mask=blocks * _UNIT < num_elements)


@triton.jit
def unpack_kernel(
    codes_ptr,
    units_ptr,
    result_ptr,
    num_elements,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Multiplies codes with the units of their blocks."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK // _UNIT)
    elements = begin + lanes[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    mask = elements < num_elements
    blocks = begin // _UNIT + lanes
    units = tl.load(units_ptr + blocks, mask=blocks * _UNIT < num_elements, other=0.0).to(tl.float32)
    values = tl.load(codes_ptr + elements, mask=mask, other=0).to(tl.float32)
    store_rounded(result_ptr + elements, values * units[:, None], mask, INTERPRETED)


def launch_pack(flat: Tensor, codes: Tensor, units: Tensor) -> None:
    """Does in Triton what `reference_pack` does."""
    launch = pack_launch(warp_size(flat))
    with on_device(flat):
        pack_kernel[(triton.cdiv(flat.numel(), launch.block),)](
            flat,
            codes,
            units,
            flat.numel(),
            LEVELS=LEVELS,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )


def launch_unpack(codes: Tensor, units: Tensor, result: Tensor) -> None:
    """Does in Triton what `reference_unpack` does."""
    launch = pack_launch(warp_size(result))
    with on_device(result):
        unpack_kernel[(triton.cdiv(codes.numel(), launch.block),)](
            codes,
            units,
            result,
            codes.numel(),
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
