"""The backward Triton half of the norms. Needs triton.

A program goes through a chunk of rows, one tile of columns wide, and adds up what they give weight and bias: partial
sums in fp32, one row for each program, which are then reduced in one order. No atomics: two runs are bitwise equal. A
row that does not fit one tile needs its two sums first, from `norm_sums_kernel`, and is read twice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._configs import norm_backward_launch, num_row_chunks
from .._launch import is_interpreting, num_multiprocessors, on_device, warp_size
from .._store import rounded, store_rounded
from ._terms import NormTerms


@triton.jit
def _normalised(x_ptrs, mask, mean, rstd, IS_CENTERED: tl.constexpr) -> tl.tensor:
    values = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    if IS_CENTERED:
        values = tl.where(mask, values - mean, 0.0)
    return values * rstd


@triton.jit
def _effective_weight(
    weight_ptr, columns, mask, weight_offset, HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32) + weight_offset
    else:
        weight = tl.full([BLOCK], 1.0, tl.float32)
    return weight


@triton.jit
def norm_sums_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    num_rows,
    num_columns,
    grad_row_stride,
    grad_column_stride,
    x_row_stride,
    x_column_stride,
    weight_offset,
    IS_CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds up, for one row, g n and g, where g is the gradient of the normalised values n. sums: [2, rows]."""
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_row_stride
    x_ptr += row * x_row_stride
    lanes = tl.arange(0, BLOCK)
    num_columns = tl.cast(num_columns, tl.int64)
    mean = 0.0
    if IS_CENTERED:
        mean = tl.load(mean_ptr + row).to(tl.float32)
    rstd = tl.load(rstd_ptr + row).to(tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    common = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = tl.cast(start, tl.int64) + lanes
        mask = columns < num_columns
        weight = _effective_weight(weight_ptr, columns, mask, weight_offset, HAS_WEIGHT, BLOCK)
        grad = tl.load(grad_ptr + columns * grad_column_stride, mask=mask, other=0.0).to(tl.float32) * weight
        along += grad * _normalised(x_ptr + columns * x_column_stride, mask, mean, rstd, IS_CENTERED)
        common += grad
    tl.store(sums_ptr + row, tl.sum(along, 0))
    tl.store(sums_ptr + num_rows + row, tl.sum(common, 0))


@triton.jit
def norm_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    sums_ptr,
    grad_x_ptr,
    partial_weight_ptr,
    partial_bias_ptr,
    num_rows,
    num_columns,
    num_tiles,
    rows_per_program,
    grad_row_stride,
    grad_column_stride,
    x_row_stride,
    x_column_stride,
    weight_offset,
    IS_CENTERED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    WANTS_BIAS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes the gradient of what was normalised, and partial sums for weight and bias."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program // num_tiles
    columns = (program - chunk * num_tiles) * BLOCK + tl.arange(0, BLOCK)
    num_columns = tl.cast(num_columns, tl.int64)
    mask = columns < num_columns
    size = num_columns.to(tl.float32)
    rounded_to: tl.constexpr = x_ptr.dtype.element_ty if ROUNDS else tl.float32
    weight = _effective_weight(weight_ptr, columns, mask, weight_offset, HAS_WEIGHT, BLOCK)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    begin = chunk * rows_per_program
    end = tl.minimum(begin + rows_per_program, num_rows)
    for index in range(begin, end):
        row = tl.cast(index, tl.int64)
        mean = 0.0
        if IS_CENTERED:
            mean = tl.load(mean_ptr + row).to(tl.float32)
        rstd = tl.load(rstd_ptr + row).to(tl.float32)
        grad_ptrs = grad_ptr + row * grad_row_stride + columns * grad_column_stride
        grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
        x_ptrs = x_ptr + row * x_row_stride + columns * x_column_stride
        normalised = _normalised(x_ptrs, mask, mean, rstd, IS_CENTERED)
        if WANTS_WEIGHT:
            weight_sum += grad * rounded(normalised, rounded_to, INTERPRETED)
        if WANTS_BIAS:
            bias_sum += grad
        grad = grad * weight
        if ONE_TILE:
            along = tl.sum(grad * normalised, 0)
            common = tl.sum(grad, 0)
        else:
            along = tl.load(sums_ptr + row).to(tl.float32)
            common = tl.load(sums_ptr + num_rows + row).to(tl.float32)
        grad_x = grad - normalised * (along / size)
        if IS_CENTERED:
            grad_x = grad_x - common / size
        store_rounded(grad_x_ptr + row * num_columns + columns, grad_x * rstd, mask, INTERPRETED)
    if WANTS_WEIGHT:
        tl.store(partial_weight_ptr + chunk * num_columns + columns, weight_sum, mask=mask)
    if WANTS_BIAS:
        tl.store(partial_bias_ptr + chunk * num_columns + columns, bias_sum, mask=mask)


def launch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    terms: NormTerms,
) -> None:
    """Does in Triton what `reference_norm_backward` does; results are contiguous."""
    num_rows, num_columns = x.shape
    launch = norm_backward_launch(num_columns, warp_size(x))
    num_tiles = triton.cdiv(num_columns, launch.block)
    num_chunks = num_row_chunks(num_rows, num_tiles, num_multiprocessors(x))
    partial = {
        name: torch.empty(num_chunks if result.numel() > 0 else 0, num_columns, dtype=torch.float32, device=x.device)
        for name, result in (("weight", grad_weight), ("bias", grad_bias))
    }
    known = x if weight is None else weight
    sums = torch.empty(2, num_rows if num_tiles > 1 else 0, dtype=torch.float32, device=x.device)
    shared = {"IS_CENTERED": terms.is_centered, "HAS_WEIGHT": weight is not None}
    how = {"BLOCK": launch.block, "num_warps": launch.num_warps, "enable_fp_fusion": True}
    with on_device(x):
        if num_tiles > 1:
            norm_sums_kernel[(num_rows,)](
                grad, x, known, mean, rstd, sums, num_rows, num_columns, *grad.stride(), *x.stride(),
                terms.weight_offset, **shared, **how,
            )  # fmt: skip
        norm_backward_kernel[(num_chunks * num_tiles,)](
            grad,
            x,
            known,
            mean,
            rstd,
            sums,
            grad_x,
            partial["weight"],
            partial["bias"],
            num_rows,
            num_columns,
            num_tiles,
            triton.cdiv(num_rows, num_chunks),
            *grad.stride(),
            *x.stride(),
            terms.weight_offset,
            ROUNDS=terms.rounds,
            WANTS_WEIGHT=grad_weight.numel() > 0,
            WANTS_BIAS=grad_bias.numel() > 0,
            ONE_TILE=num_tiles == 1,
            INTERPRETED=is_interpreting(),
            **shared,
            **how,
        )
    for name, result in (("weight", grad_weight), ("bias", grad_bias)):
        if result.numel() > 0:
            result.copy_(partial[name].sum(0))
