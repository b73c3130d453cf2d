"""What the norms cost, beside eager code that does the same: pure arithmetic."""

from typing import Literal

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from .._configs import norm_backward_launch, num_row_chunks
from ..cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of

__all__ = ["NormShape", "backward_work", "cost", "partial_bytes"]

# Of an H100 or H200: only the buffer in which weight gradients meet depends on it.
_NUM_MULTIPROCESSORS = 132


class NormShape(Struct, frozen=True, kw_only=True):
    """One call of `rms_norm`, `add_rms_norm` or `layer_norm`."""

    num_rows: int
    """Tokens."""
    num_columns: int
    """What a row is normalised over."""
    casting: Literal["llama", "gemma", "plain"] = "llama"
    is_layer_norm: bool = False
    adds_residual: bool = False
    wants_weight_gradient: bool = True
    """False for a frozen or missing weight."""
    rebuilds_result: bool = False
    """Inside `recompute_handles`, followed by layers that keep the result for nothing but their own backward."""


def cost(
    shape: NormShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Forward and backward, and the rebuild where there is one, of tensors and weight in `dtype`.

    `saved_bytes` are what is normalised, its statistics, and what the layers that follow keep of the result. A tensor
    whose leading dimensions have no common stride costs a copy on top.

    Raises:
        UsageError: a size is negative, or the device has no rate for the dtype.
    """
    if min(shape.num_rows, shape.num_columns) < 0:
        raise UsageError(f"norms have no cost for {shape}; sizes must not be negative")
    tensor_bytes = shape.num_rows * shape.num_columns * dtype.itemsize
    row_bytes = _row_bytes(shape, dtype)
    sums_bytes = partial_bytes(shape)
    added = 2 if shape.adds_residual else 0
    forward = Work(bytes_moved=(2 + added) * tensor_bytes + row_bytes)
    backward = backward_work(shape, dtype)
    rebuild = [Work(bytes_moved=2 * tensor_bytes + row_bytes)] if shape.rebuilds_result else []
    work = [forward, *backward, *rebuild]
    input_bytes = tensor_bytes + row_bytes
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=input_bytes if shape.rebuilds_result else input_bytes + tensor_bytes,
        # In backward: what was normalised, its gradient, partial sums; in forward, with a residual, sum and result.
        transient_bytes=2 * tensor_bytes + row_bytes + sums_bytes,
        seconds=seconds_of(work, dtype, device, calibration),
        eager=_eager(shape, dtype, device, calibration),
    )


def backward_work(shape: NormShape, dtype: torch.dtype) -> list[Work]:
    """The kernels of backward."""
    tensor_bytes = shape.num_rows * shape.num_columns * dtype.itemsize
    row_bytes, sums_bytes = _row_bytes(shape, dtype), partial_bytes(shape)
    work = [Work(bytes_moved=(3 + shape.adds_residual) * tensor_bytes + row_bytes + sums_bytes)]
    if shape.num_columns > norm_backward_launch(shape.num_columns, 32).block:
        # A row that no program can hold is read twice.
        work.append(Work(bytes_moved=2 * tensor_bytes + row_bytes))
    if sums_bytes:
        work.append(Work(bytes_moved=sums_bytes))
    return work


def _row_bytes(shape: NormShape, dtype: torch.dtype) -> int:
    return shape.num_rows * max(4, dtype.itemsize) * (2 if shape.is_layer_norm else 1)


def partial_bytes(shape: NormShape) -> int:
    """What backward sums up the gradients of weight and bias in."""
    if not shape.wants_weight_gradient or shape.num_rows == 0:
        return 0
    block = norm_backward_launch(shape.num_columns, 32).block
    num_chunks = num_row_chunks(shape.num_rows, max(1, -(-shape.num_columns // block)), _NUM_MULTIPROCESSORS)
    return num_chunks * shape.num_columns * 4 * (2 if shape.is_layer_norm else 1)


def _eager(shape: NormShape, dtype: torch.dtype, device: Hardware, calibration: Calibration) -> KernelCost:
    """As transformers writes it for llama and gemma, operator by operator; torch's own fused norms for the others."""
    elements = shape.num_rows * shape.num_columns
    e, wide = dtype.itemsize, max(4, dtype.itemsize)
    is_fused = shape.casting == "plain" or shape.is_layer_norm
    if is_fused:
        # Backward reads both tensors a second time for the weight.
        moved = [2 * e, 3 * e, *([2 * e] if shape.wants_weight_gradient else [])]
        saved, transient = 2 * e, 3 * e
    else:
        cast = [] if e == wide else [e + wide]
        product = 2 * e if shape.casting == "llama" else 2 * wide
        normalised = e if shape.casting == "llama" else wide
        # Cast, square, mean, multiply, cast, weight; then weight, its sum, cast, two factors, the mean's share, cast.
        moved = [*cast, 2 * wide, wide, 2 * wide, *cast, product]
        moved += [product, *([product + normalised] if shape.wants_weight_gradient else []), *cast]
        moved += [2 * wide, 3 * wide, 2 * wide, 3 * wide, *cast]
        saved = wide + normalised + e if cast else 3 * e
        transient = saved + 2 * wide
    if shape.adds_residual:
        moved += [3 * e, 3 * e]
        saved += 0 if is_fused else e
        transient += e
    work = [Work(bytes_moved=size * elements) for size in moved]
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=saved * elements,
        transient_bytes=transient * elements,
        seconds=seconds_of(work, dtype, device, calibration),
    )
