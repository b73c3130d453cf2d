"""The forward Triton half of the norm. Needs triton.

One program normalises one row: held in registers up to `ONE_TILE`, beyond that read again from the L2 cache. Everything
is fp32 inside.
"""

import triton
import triton.language as tl
from torch import Tensor

from .._configs import norm_launch
from .._launch import is_interpreting, on_device, warp_size
from .._store import rounded, store_rounded
from ._terms import NormTerms


@triton.jit
def _applied(
    values,
    rstd,
    weight_ptr,
    columns,
    mask,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Returns the fp32 result of the norm for `values` of one row."""
    result = rounded(values * rstd, ROUNDED_TO, INTERPRETED)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
        result = result * weight
    return result


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    result_ptr,
    rstd_ptr,
    num_columns,
    x_row_stride,
    x_column_stride,
    eps,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalises one row, and keeps 1 / root of its mean square.

    ROUNDS: the normalised value is rounded to the dtype of x before it meets the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    num_columns = tl.cast(num_columns, tl.int64)
    result_ptr += row * num_columns
    rounded_to: tl.constexpr = x_ptr.dtype.element_ty if ROUNDS else tl.float32
    lanes = tl.arange(0, BLOCK)
    size = num_columns.to(tl.float32)
    if ONE_TILE:
        columns = lanes.to(tl.int64)
        mask = columns < num_columns
        values = tl.load(x_ptr + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        result = _applied(
            values, rstd, weight_ptr, columns, mask, weight_offset, HAS_WEIGHT, rounded_to, INTERPRETED
        )  # fmt: skip
        store_rounded(result_ptr + columns, result, mask, INTERPRETED)
    else:
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, num_columns, BLOCK):
            columns = tl.cast(start, tl.int64) + lanes
            mask = columns < num_columns
            values = tl.load(x_ptr + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
            total += tl.sum(values * values, 0)
        rstd = tl.rsqrt(total / size + eps)
        for start in range(0, num_columns, BLOCK):
            columns = tl.cast(start, tl.int64) + lanes
            mask = columns < num_columns
            values = tl.load(x_ptr + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
            result = _applied(
                values, rstd, weight_ptr, columns, mask, weight_offset, HAS_WEIGHT, rounded_to, INTERPRETED
            )  # fmt: skip
            store_rounded(result_ptr + columns, result, mask, INTERPRETED)
    tl.store(rstd_ptr + row, rstd)


def launch_norm(x: Tensor, weight: Tensor | None, result: Tensor, rstd: Tensor, terms: NormTerms) -> None:
    """Does in Triton what `reference_norm` does; `result` is contiguous."""
    num_rows, num_columns = x.shape
    launch = norm_launch(num_columns, warp_size(x))
    with on_device(x):
        norm_kernel[(num_rows,)](
            x,
            # A tensor in the place of one that is not there is not read.
            x if weight is None else weight,
            result,
            rstd,
            num_columns,
            *x.stride(),
            terms.eps,
            terms.weight_offset,
            HAS_WEIGHT=weight is not None,
            ROUNDS=terms.rounds,
            ONE_TILE=num_columns <= launch.block,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
