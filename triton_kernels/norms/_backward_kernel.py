"""The backward Triton half of the norm. Needs triton.

A program goes through a chunk of rows, one tile of columns wide, and adds up what they give the weight: partial sums in
fp32, one row for each program, which are then reduced in one order. No atomics: two runs are bitwise equal. A row that
does not fit one tile needs its sum first, from `norm_sums_kernel`, and is read twice.
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
def _normalised(x_ptrs, mask, rstd) -> tl.tensor:
    return tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32) * rstd


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
    rstd_ptr,
    sums_ptr,
    num_columns,
    grad_row_stride,
    grad_column_stride,
    x_row_stride,
    x_column_stride,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Adds up, for one row, g n, where g is the gradient of the normalised values n. sums: [rows]."""
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * grad_row_stride
    x_ptr += row * x_row_stride
    lanes = tl.arange(0, BLOCK)
    num_columns = tl.cast(num_columns, tl.int64)
    rstd = tl.load(rstd_ptr + row).to(tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = tl.cast(start, tl.int64) + lanes
        mask = columns < num_columns
        weight = _effective_weight(weight_ptr, columns, mask, weight_offset, HAS_WEIGHT, BLOCK)
        grad = tl.load(grad_ptr + columns * grad_column_stride, mask=mask, other=0.0).to(tl.float32) * weight
        along += grad * _normalised(x_ptr + columns * x_column_stride, mask, rstd)
    tl.store(sums_ptr + row, tl.sum(along, 0))


@triton.jit
def norm_backward_kernel(
    grad_ptr,
    x_ptr,
    weight_ptr,
    rstd_ptr,
    sums_ptr,
    grad_x_ptr,
    partial_weight_ptr,
    num_rows,
    num_columns,
    num_tiles,
    rows_per_program,
    grad_row_stride,
    grad_column_stride,
    x_row_stride,
    x_column_stride,
    weight_offset,
    HAS_WEIGHT: tl.constexpr,
    ROUNDS: tl.constexpr,
    WANTS_WEIGHT: tl.constexpr,
    ONE_TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Computes the gradient of what was normalised, and partial sums for the weight."""
    program = tl.program_id(0).to(tl.int64)
    chunk = program // num_tiles
    columns = (program - chunk * num_tiles) * BLOCK + tl.arange(0, BLOCK)
    num_columns = tl.cast(num_columns, tl.int64)
    mask = columns < num_columns
    size = num_columns.to(tl.float32)
    rounded_to: tl.constexpr = x_ptr.dtype.element_ty if ROUNDS else tl.float32
    weight = _effective_weight(weight_ptr, columns, mask, weight_offset, HAS_WEIGHT, BLOCK)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    begin = chunk * rows_per_program
    end = tl.minimum(begin + rows_per_program, num_rows)
    for index in range(begin, end):
        row = tl.cast(index, tl.int64)
        rstd = tl.load(rstd_ptr + row).to(tl.float32)
        grad_ptrs = grad_ptr + row * grad_row_stride + columns * grad_column_stride
        grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
        x_ptrs = x_ptr + row * x_row_stride + columns * x_column_stride
        normalised = _normalised(x_ptrs, mask, rstd)
        if WANTS_WEIGHT:
            weight_sum += grad * rounded(normalised, rounded_to, INTERPRETED)
        grad = grad * weight
        along = tl.sum(grad * normalised, 0) if ONE_TILE else tl.load(sums_ptr + row).to(tl.float32)
        grad_x = grad - normalised * (along / size)
        store_rounded(grad_x_ptr + row * num_columns + columns, grad_x * rstd, mask, INTERPRETED)
    if WANTS_WEIGHT:
        tl.store(partial_weight_ptr + chunk * num_columns + columns, weight_sum, mask=mask)


def launch_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    grad_x: Tensor,
    grad_weight: Tensor,
    terms: NormTerms,
) -> None:
    """Does in Triton what `reference_norm_backward` does; results are contiguous."""
    num_rows, num_columns = x.shape
    launch = norm_backward_launch(num_columns, warp_size(x))
    num_tiles = triton.cdiv(num_columns, launch.block)
    num_chunks = num_row_chunks(num_rows, num_tiles, num_multiprocessors(x))
    num_sums = num_chunks if grad_weight.numel() > 0 else 0
    partial = torch.empty(num_sums, num_columns, dtype=torch.float32, device=x.device)
    known = x if weight is None else weight
    sums = torch.empty(num_rows if num_tiles > 1 else 0, dtype=torch.float32, device=x.device)
    how = {
        "HAS_WEIGHT": weight is not None,
        "BLOCK": launch.block,
        "num_warps": launch.num_warps,
        "enable_fp_fusion": True,
    }
    with on_device(x):
        if num_tiles > 1:
            norm_sums_kernel[(num_rows,)](
                grad, x, known, rstd, sums, num_columns, *grad.stride(), *x.stride(), terms.weight_offset, **how
            )  # fmt: skip
        norm_backward_kernel[(num_chunks * num_tiles,)](
            grad,
            x,
            known,
            rstd,
            sums,
            grad_x,
            partial,
            num_rows,
            num_columns,
            num_tiles,
            triton.cdiv(num_rows, num_chunks),
            *grad.stride(),
            *x.stride(),
            terms.weight_offset,
            ROUNDS=terms.rounds,
            WANTS_WEIGHT=grad_weight.numel() > 0,
            ONE_TILE=num_tiles == 1,
            INTERPRETED=is_interpreting(),
            **how,
        )
    if grad_weight.numel() > 0:
        grad_weight.copy_(partial.sum(0))
