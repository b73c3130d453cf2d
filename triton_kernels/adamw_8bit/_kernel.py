"""The Triton half of `adamw_8bit_`. Needs triton.

Every operation is rounded as IEEE 754 says, none fused with another: the CPU's reference gives the same bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._configs import adamw_8bit_launch
from .._launch import is_interpreting, on_device
from .._store import nearest_integers, store_rounded
from ._terms import BLOCK_ELEMENTS, MOMENT_LEVELS, ROOT_CEILING, ROOT_LEVELS, Moments, Scalars

_UNIT = tl.constexpr(BLOCK_ELEMENTS)
_MOMENT_LEVELS = tl.constexpr(float(MOMENT_LEVELS))
_ROOT_SQUARES = tl.constexpr(float(ROOT_LEVELS**2))
_ROOT_CEILING = tl.constexpr(float(ROOT_CEILING))


@triton.jit
def _quantised(values, LEVELS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Returns values [blocks, elements] in units of their block, not yet rounded, and the units [blocks]."""
    is_number = values == values
    largest = tl.max(tl.where(is_number, tl.abs(values), 0.0), 1)
    units = tl.div_rn(largest, tl.zeros_like(largest) + LEVELS)
    inverses = tl.div_rn(tl.zeros_like(units) + 1.0, tl.where(units > 0.0, units, 1.0))
    codes = values * inverses[:, None]
    codes = tl.where(codes == codes, codes, 0.0)
    codes = tl.maximum(tl.minimum(codes, LEVELS), -LEVELS)
    num_bad = tl.max((values != values).to(tl.int32), 1)
    return codes, tl.where(num_bad > 0, float("nan"), units)


@triton.jit
def adamw_8bit_kernel(
    param_ptr,
    grad_ptr,
    first_ptr,
    root_ptr,
    first_units_ptr,
    root_units_ptr,
    num_elements,
    decay,
    first_share,
    second_decay,
    second_share,
    step_size,
    root_factor,
    eps,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Steps the elements of several blocks; moments are rounded after the step has used them."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lanes = tl.arange(0, BLOCK // _UNIT)
    elements = begin + lanes[:, None] * _UNIT + tl.arange(0, _UNIT)[None, :]
    mask = elements < num_elements
    blocks = begin // _UNIT + lanes
    block_mask = blocks * _UNIT < num_elements
    param = tl.load(param_ptr + elements, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + elements, mask=mask, other=0.0).to(tl.float32)
    first = tl.load(first_ptr + elements, mask=mask, other=0).to(tl.float32)
    code = tl.load(root_ptr + elements, mask=mask, other=0).to(tl.float32)
    first_units = tl.load(first_units_ptr + blocks, mask=block_mask, other=0.0).to(tl.float32)
    root_units = tl.load(root_units_ptr + blocks, mask=block_mask, other=0.0).to(tl.float32)
    first = first * first_units[:, None]
    root = code * code * root_units[:, None]
    first = first + (grad - first) * first_share
    second = root * root * second_decay + grad * grad * second_share
    root = tl.sqrt_rn(second)
    deviation = root * root_factor + eps
    param = param * decay - tl.div_rn(first, deviation) * step_size
    first_codes, first_units = _quantised(first, _MOMENT_LEVELS)
    squares, root_units = _quantised(root, _ROOT_SQUARES)
    codes = tl.sqrt_rn(squares)
    codes = tl.where(codes < _ROOT_CEILING, tl.ceil(codes), codes)
    tl.store(first_ptr + elements, nearest_integers(first_codes).to(tl.int8), mask=mask)
    tl.store(root_ptr + elements, nearest_integers(codes).to(tl.uint8), mask=mask)
    tl.store(first_units_ptr + blocks, first_units, mask=block_mask)
    tl.store(root_units_ptr + blocks, root_units, mask=block_mask)
    store_rounded(param_ptr + elements, param, mask, INTERPRETED)


def launch_adamw_8bit(param: Tensor, grad: Tensor, moments: Moments, scalars: Scalars) -> None:
    """Does in Triton what `reference_adamw_8bit` does."""
    launch = adamw_8bit_launch()
    with on_device(param):
        adamw_8bit_kernel[(triton.cdiv(param.numel(), launch.block),)](
            param,
            grad,
            *moments,
            param.numel(),
            *scalars,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
