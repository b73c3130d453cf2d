"""The forward Triton half of the norms: RMSNorm and LayerNorm. Needs triton.

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
    mean,
    rstd,
    weight_ptr,
    bias_ptr,
    columns,
    mask,
    weight_offset,
    IS_CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> tl.tensor:
    """Returns the fp32 result of the norm for `values` of one row."""
    if IS_CENTERED:
        values = values - mean
    result = rounded(values * rstd, ROUNDED_TO, INTERPRETED)
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
        if HAS_BIAS:
            # Fused in so many words: a result must not depend on whether a compiler contracts.
            result = tl.fma(result, weight, tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32))
        else:
            result = result * weight
    elif HAS_BIAS:
        result = result + tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return result


@triton.jit
def _mean(values, mask, size) -> tl.tensor:
    """Returns the mean inside the mask; what the first sum lost of a common offset is in the differences from it."""
    first = tl.sum(values, 0) / size
    return first + tl.sum(tl.where(mask, values - first, 0.0), 0) / size


@triton.jit
def norm_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    result_ptr,
    mean_ptr,
    rstd_ptr,
    num_columns,
    x_row_stride,
    x_column_stride,
    eps,
    weight_offset,
    IS_CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROUNDS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Normalises one row, and keeps its mean and 1 / standard deviation.

    ROUNDS: the normalised value is rounded to the dtype of x before it meets the weight.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_row_stride
    num_columns = tl.cast(num_columns, tl.int64)
    result_ptr += row * num_columns
    rounded_to: tl.constexpr = x_ptr.dtype.element_ty if ROUNDS else tl.float32
    lanes = tl.arange(0, BLOCK)
    size = num_columns.to(tl.float32)
    mean = 0.0
    if ONE_TILE:
        columns = lanes.to(tl.int64)
        mask = columns < num_columns
        values = tl.load(x_ptr + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
        centered = values
        if IS_CENTERED:
            mean = _mean(values, mask, size)
            centered = tl.where(mask, values - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(centered * centered, 0) / size + eps)
        result = _applied(
            values, mean, rstd, weight_ptr, bias_ptr, columns, mask, weight_offset,
            IS_CENTERED, HAS_WEIGHT, HAS_BIAS, rounded_to, INTERPRETED,
        )  # fmt: skip
        store_rounded(result_ptr + columns, result, mask, INTERPRETED)
    else:
        total = tl.full((), 0.0, tl.float32)
        seen_mean = tl.full((), 0.0, tl.float32)
        for start in range(0, num_columns, BLOCK):
            columns = tl.cast(start, tl.int64) + lanes
            mask = columns < num_columns
            values = tl.load(x_ptr + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
            if IS_CENTERED:
                # Each tile around its own mean, then joined: a common offset must not drown the differences.
                num_seen = tl.cast(start, tl.int64).to(tl.float32)
                num_here = tl.minimum(num_columns - start, BLOCK).to(tl.float32)
                tile_mean = _mean(values, mask, num_here)
                difference = tile_mean - seen_mean
                centered = tl.where(mask, values - tile_mean, 0.0)
                share = num_here / (num_seen + num_here)
                total += tl.sum(centered * centered, 0) + difference * difference * num_seen * share
                seen_mean += difference * share
            else:
                total += tl.sum(values * values, 0)
        mean = seen_mean
        rstd = tl.rsqrt(total / size + eps)
        for start in range(0, num_columns, BLOCK):
            columns = tl.cast(start, tl.int64) + lanes
            mask = columns < num_columns
            values = tl.load(x_ptr + columns * x_column_stride, mask=mask, other=0.0).to(tl.float32)
            result = _applied(
                values, mean, rstd, weight_ptr, bias_ptr, columns, mask, weight_offset,
                IS_CENTERED, HAS_WEIGHT, HAS_BIAS, rounded_to, INTERPRETED,
            )  # fmt: skip
            store_rounded(result_ptr + columns, result, mask, INTERPRETED)
    if IS_CENTERED:
        tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


def launch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    result: Tensor,
    mean: Tensor,
    rstd: Tensor,
    terms: NormTerms,
) -> None:
    """Does in Triton what `reference_norm` does; `result` is contiguous."""
    num_rows, num_columns = x.shape
    launch = norm_launch(num_columns, warp_size(x))
    with on_device(x):
        norm_kernel[(num_rows,)](
            x,
            # A tensor in the place of one that is not there is not read.
            x if weight is None else weight,
            x if bias is None else bias,
            result,
            mean,
            rstd,
            num_columns,
            *x.stride(),
            terms.eps,
            terms.weight_offset,
            IS_CENTERED=terms.is_centered,
            HAS_WEIGHT=weight is not None,
            HAS_BIAS=bias is not None,
            ROUNDS=terms.rounds,
            ONE_TILE=num_columns <= launch.block,
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=True,
        )
