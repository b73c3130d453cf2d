"""The Triton half of `dropout`. Needs triton.

Nothing is fused: the CPU's reference gives the same bits. Elements are counted row by row, whatever their strides are.
"""

import triton
import triton.language as tl
from torch import Tensor

from ._configs import dropout_launch
from ._launch import is_interpreting, on_device, warp_size
from ._random_bits import random_bits
from ._store import store_rounded

__all__ = ["dropout_kernel", "launch_dropout"]


@triton.jit
def dropout_kernel(
    x_ptr,
    residual_ptr,
    result_ptr,
    seed_ptr,
    num_elements,
    num_columns,
    x_row_stride,
    x_column_stride,
    residual_row_stride,
    residual_column_stride,
    threshold,
    scale,
    site,
    ADDS: tl.constexpr,
    IS_FLAT: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """result = x * factor + residual, the factor 0 or `scale`."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    groups = tl.arange(0, BLOCK // 8)[:, None]
    elements = begin + groups * 8 + tl.arange(0, 8)[None, :]
    mask = elements < num_elements
    x_offsets, residual_offsets = elements, elements
    if not IS_FLAT:
        rows = elements // num_columns
        columns = elements - rows * num_columns
        x_offsets = rows * x_row_stride + columns * x_column_stride
        residual_offsets = rows * residual_row_stride + columns * residual_column_stride
    seed = tl.load(seed_ptr + 0).to(tl.int64)
    bits = random_bits(seed, begin // 8 + groups, tl.cast(site, tl.int64), tl.full((), 0, tl.int64))
    values = tl.load(x_ptr + x_offsets, mask=mask, other=0.0).to(tl.float32)
    # A factor, not a choice: what is not a number stays none, also where it is dropped.
    values = values * tl.where(bits >= threshold, scale, 0.0)
    if ADDS:
        values += tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0).to(tl.float32)
    store_rounded(result_ptr + elements, values, mask, INTERPRETED)


def launch_dropout(
    x: Tensor, residual: Tensor | None, result: Tensor, seed: Tensor, threshold: int, scale: float, site: int
) -> None:
    """`reference_dropout` in Triton; `result` contiguous."""
    launch = dropout_launch(warp_size(x))
    known = x if residual is None else residual
    with on_device(x):
        dropout_kernel[(triton.cdiv(x.numel(), launch.block),)](
            x,
            known,
            result,
            seed,
            x.numel(),
            x.shape[1],
            *x.stride(),
            *known.stride(),
            threshold,
            scale,
            site,
            ADDS=residual is not None,
            IS_FLAT=x.is_contiguous() and known.is_contiguous(),
            INTERPRETED=is_interpreting(),
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
