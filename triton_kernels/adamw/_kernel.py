"""The Triton half of `FusedAdamW`. Needs triton. One launch updates many tensors, whose addresses stand in a table.

Every operation is rounded as IEEE 754 says, none fused with another: the CPU's reference gives the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._configs import ADAMW_CHUNK, adamw_launch
from .._launch import is_interpreting, on_device
from .._store import store_rounded, store_stochastic
from ._random_bits import random_bits
from ._tensor_table import TensorTable
from ._terms import MOMENT_LEVELS, QUANTISED_ELEMENTS, ROOT_CEILING, ROOT_LEVELS, Moments, Scalar

__all__ = ["adamw_8bit_kernel", "adamw_kernel", "launch_adamw", "launch_square_sum", "square_sum_kernel"]

# Of a row of the table: param, grad, both moments, both units, elements, first program, number of the parameter.
_ROW = tl.constexpr(9)
_SCALARS = tl.constexpr(len(Scalar))
_QUANTISED = tl.constexpr(QUANTISED_ELEMENTS)
_MOMENT_LEVELS = tl.constexpr(float(MOMENT_LEVELS))
_ROOT_SQUARES = tl.constexpr(float(ROOT_LEVELS**2))
_ROOT_CEILING = tl.constexpr(float(ROOT_CEILING))
# Added to an fp32 number below 2^22 it rounds to the nearest integer, which then stands in the low bits.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _tensor_at(rows_ptr, COLUMN: tl.constexpr, like, EVEN: tl.constexpr) -> tl.tensor:
    """A tensor of the table, of the same dtype as `like`."""
    pointer = tl.load(rows_ptr + COLUMN).to(tl.int64).to(like.dtype)
    if EVEN:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _share_of(rows_ptr, program, CHUNK: tl.constexpr, EVEN: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where a program begins in its tensor, and where that ends."""
    num_elements = tl.load(rows_ptr + 6).to(tl.int64)
    begin = (program - tl.load(rows_ptr + 7).to(tl.int64)) * CHUNK
    if EVEN:
        num_elements = tl.multiple_of(num_elements, 16)
    return begin, num_elements


@triton.jit
def square_sum_kernel(
    tensor_ptr, rows_ptr, chunks_ptr, sums_ptr, EVEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Each program's sum of squares, in fp64: no order of adding shows in fp32."""
    program = tl.program_id(0).to(tl.int64)
    rows_ptr += tl.load(chunks_ptr + program).to(tl.int64) * _ROW
    tensor = _tensor_at(rows_ptr, 1, tensor_ptr, EVEN)
    begin, num_elements = _share_of(rows_ptr, program, CHUNK, EVEN)
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tl.minimum(num_elements - begin, CHUNK), BLOCK):
        elements = begin + start + lanes
        values = tl.load(tensor + elements, mask=elements < num_elements, other=0.0).to(tl.float32).to(tl.float64)
        total += values * values
    tl.store(sums_ptr + program, tl.sum(total, 0))


@triton.jit
def _scalar(scalars_ptr, COLUMN: tl.constexpr) -> tl.tensor:
    return tl.load(scalars_ptr + COLUMN).to(tl.float32)


@triton.jit
def _step(param, grad, first, second, scalars_ptr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The new parameter, moments, and root of the second moment."""
    grad = grad * _scalar(scalars_ptr, 0)
    param = param * _scalar(scalars_ptr, 1)
    first = first + (grad - first) * _scalar(scalars_ptr, 2)
    second = second * _scalar(scalars_ptr, 3) + grad * grad * _scalar(scalars_ptr, 4)
    root = tl.sqrt_rn(second)
    deviation = root * _scalar(scalars_ptr, 6) + _scalar(scalars_ptr, 7)
    param = param - tl.div_rn(first, deviation) * _scalar(scalars_ptr, 5)
    return param, first, second, root


@triton.jit
def adamw_kernel(
    param_ptr,
    grad_ptr,
    moment_ptr,
    rows_ptr,
    chunks_ptr,
    scalars_ptr,
    seed,
    IS_STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One step with moments in fp32. The first three pointers only tell dtypes."""
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(chunks_ptr + program).to(tl.int64)
    rows_ptr += index * _ROW
    scalars_ptr += index * _SCALARS
    params = _tensor_at(rows_ptr, 0, param_ptr, EVEN)
    grads = _tensor_at(rows_ptr, 1, grad_ptr, EVEN)
    firsts = _tensor_at(rows_ptr, 2, moment_ptr, EVEN)
    seconds = _tensor_at(rows_ptr, 3, moment_ptr, EVEN)
    begin, num_elements = _share_of(rows_ptr, program, CHUNK, EVEN)
    lanes = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    for start in range(0, tl.minimum(num_elements - begin, CHUNK), BLOCK):
        elements = begin + start + lanes
        mask = elements < num_elements
        param = tl.load(params + elements, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grads + elements, mask=mask, other=0.0).to(tl.float32)
        first = tl.load(firsts + elements, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(seconds + elements, mask=mask, other=0.0).to(tl.float32)
        param, first, second, _ = _step(param, grad, first, second, scalars_ptr)
        tl.store(firsts + elements, first, mask=mask)
        tl.store(seconds + elements, second, mask=mask)
        if IS_STOCHASTIC:
            groups = (begin + start) // 8 + tl.arange(0, BLOCK // 8)[:, None]
            number = tl.load(rows_ptr + 8).to(tl.int64)
            bits = random_bits(seed, groups, _scalar(scalars_ptr, 8).to(tl.int64), number)
            store_stochastic(params + elements, param, bits, mask)
        else:
            store_rounded(params + elements, param, mask, INTERPRETED)


@triton.jit
def _quantised(values, LEVELS: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Values [blocks, groups, 8] in units of their block, not yet rounded, and the units [blocks]."""
    is_number = values == values
    largest = tl.max(tl.max(tl.where(is_number, tl.abs(values), 0.0), 2), 1)
    units = tl.div_rn(largest, tl.zeros_like(largest) + LEVELS)
    inverses = tl.div_rn(tl.zeros_like(units) + 1.0, tl.where(units > 0.0, units, 1.0))
    codes = values * inverses[:, None, None]
    codes = tl.where(codes == codes, codes, 0.0)
    codes = tl.maximum(tl.minimum(codes, LEVELS), -LEVELS)
    num_bad = tl.max(tl.max((values != values).to(tl.int32), 2), 1)
    return codes, tl.where(num_bad > 0, float("nan"), units)


@triton.jit
def _integers(values) -> tl.tensor:
    """The nearest integers, modulo 2^22: cheaper than a conversion."""
    return (values + _ROUNDER).to(tl.int32, bitcast=True)


@triton.jit
def adamw_8bit_kernel(
    param_ptr,
    grad_ptr,
    first_ptr,
    second_ptr,
    unit_ptr,
    rows_ptr,
    chunks_ptr,
    scalars_ptr,
    seed,
    IS_STOCHASTIC: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRETED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One step with moments of 8 bits, which are rounded after the step has used them. Five pointers tell dtypes."""
    program = tl.program_id(0).to(tl.int64)
    index = tl.load(chunks_ptr + program).to(tl.int64)
    rows_ptr += index * _ROW
    scalars_ptr += index * _SCALARS
    params = _tensor_at(rows_ptr, 0, param_ptr, EVEN)
    grads = _tensor_at(rows_ptr, 1, grad_ptr, EVEN)
    firsts = _tensor_at(rows_ptr, 2, first_ptr, EVEN)
    seconds = _tensor_at(rows_ptr, 3, second_ptr, EVEN)
    first_units = _tensor_at(rows_ptr, 4, unit_ptr, False)
    root_units = _tensor_at(rows_ptr, 5, unit_ptr, False)
    begin, num_elements = _share_of(rows_ptr, program, CHUNK, EVEN)
    block_lanes = tl.arange(0, BLOCK // _QUANTISED)
    groups = block_lanes[:, None, None] * (_QUANTISED // 8) + tl.arange(0, _QUANTISED // 8)[None, :, None]
    lanes = groups * 8 + tl.arange(0, 8)[None, None, :]
    for start in range(0, tl.minimum(num_elements - begin, CHUNK), BLOCK):
        elements = begin + start + lanes
        mask = elements < num_elements
        blocks = (begin + start) // _QUANTISED + block_lanes
        block_mask = blocks * _QUANTISED < num_elements
        param = tl.load(params + elements, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grads + elements, mask=mask, other=0.0).to(tl.float32)
        first_code = tl.load(firsts + elements, mask=mask, other=0).to(tl.float32)
        root_code = tl.load(seconds + elements, mask=mask, other=0).to(tl.float32)
        first_unit = tl.load(first_units + blocks, mask=block_mask, other=0.0).to(tl.float32)
        root_unit = tl.load(root_units + blocks, mask=block_mask, other=0.0).to(tl.float32)
        root = root_code * root_code * root_unit[:, None, None]
        param, first, _, root = _step(param, grad, first_code * first_unit[:, None, None], root * root, scalars_ptr)
        first_code, first_unit = _quantised(first, _MOMENT_LEVELS)
        root_square, root_unit = _quantised(root, _ROOT_SQUARES)
        root_code = tl.sqrt_rn(root_square)
        root_code = tl.where(root_code < _ROOT_CEILING, tl.ceil(root_code), root_code)
        tl.store(firsts + elements, _integers(first_code).to(tl.int8), mask=mask)
        tl.store(seconds + elements, _integers(root_code).to(tl.uint8), mask=mask)
        tl.store(first_units + blocks, first_unit, mask=block_mask)
        tl.store(root_units + blocks, root_unit, mask=block_mask)
        if IS_STOCHASTIC:
            number = tl.load(rows_ptr + 8).to(tl.int64)
            bits = random_bits(seed, (begin + start) // 8 + groups, _scalar(scalars_ptr, 8).to(tl.int64), number)
            store_stochastic(params + elements, param, bits, mask)
        else:
            store_rounded(params + elements, param, mask, INTERPRETED)


def launch_square_sum(tensors: list[Tensor], total: Tensor) -> None:
    """Fills `total`, a scalar in fp64, with the sum of the squares of all elements."""
    with on_device(total):
        table = TensorTable([[], tensors, [], [], [], []], [0] * len(tensors))
        launch = adamw_launch(table.is_even)
        sums = torch.empty(table.num_programs, dtype=torch.float64, device=total.device)
        if table.num_programs > 0:
            square_sum_kernel[(table.num_programs,)](
                tensors[0],
                table.rows,
                table.chunks,
                sums,
                EVEN=table.is_even,
                CHUNK=ADAMW_CHUNK,
                BLOCK=launch.block,
                num_warps=launch.num_warps,
                enable_fp_fusion=False,
            )
        torch.sum(sums, 0, out=total)


def launch_adamw(
    params: list[Tensor], grads: list[Tensor], moments: Moments, scalars: Tensor, numbers: list[int], seed: int | None
) -> None:
    """One step of each parameter, in place; arguments as of `reference_adamw`."""
    is_quantised = len(moments.exp_avg_units) > 0
    # Param, gradient, both moments and their unit: of moments in fp32 one will do.
    kinds = [params[0], grads[0], moments.exp_avgs[0]]
    if is_quantised:
        kinds += [moments.exp_avg_sqs[0], moments.exp_avg_units[0]]
    with on_device(params[0]):
        table = TensorTable([params, grads, *moments], numbers)
        if table.num_programs == 0:
            return
        launch = adamw_launch(table.is_even)
        kernel = adamw_8bit_kernel if is_quantised else adamw_kernel
        kernel[(table.num_programs,)](
            *kinds,
            table.rows,
            table.chunks,
            scalars,
            0 if seed is None else seed,
            IS_STOCHASTIC=seed is not None,
            EVEN=table.is_even,
            INTERPRETED=is_interpreting(),
            CHUNK=ADAMW_CHUNK,
            BLOCK=launch.block,
            num_warps=launch.num_warps,
            enable_fp_fusion=False,
        )
