"""What `softmax_cross_entropy` costs, beside eager `F.cross_entropy(logits.float(), target)`: pure arithmetic."""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from .cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of

__all__ = ["SoftmaxLossShape", "cost"]


class SoftmaxLossShape(Struct, frozen=True, kw_only=True):
    """One call of `softmax_cross_entropy`."""

    num_rows: int
    """Tokens."""
    vocabulary_size: int
    overwrites_logits: bool = False
    """Their gradient takes their place."""


def cost(
    shape: SoftmaxLossShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Forward and backward, for a scalar loss of logits whose leading dimensions are at most two strides apart.

    `saved_bytes` are the logits, which their layer does not keep, and the sums of each row.

    Raises:
        UsageError: a size is negative or zero where it cannot be, or the device has no rate for the dtype.
    """
    if shape.num_rows < 0 or shape.vocabulary_size < 1:
        raise UsageError(f"softmax_cross_entropy has no cost for {shape}; sizes must be positive")
    element, wide = dtype.itemsize, max(4, dtype.itemsize)
    logits = shape.num_rows * shape.vocabulary_size
    # Target, and sums and loss of each row.
    row_bytes = shape.num_rows * 2 * wide
    work = [
        Work(bytes_moved=logits * element + row_bytes + shape.num_rows * (8 + wide)),
        Work(bytes_moved=2 * logits * element + row_bytes + shape.num_rows * 8),
    ]
    saved_bytes = logits * element + row_bytes
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=saved_bytes,
        transient_bytes=saved_bytes + (0 if shape.overwrites_logits else logits * element),
        seconds=seconds_of(work, dtype, device, calibration),
        eager=_eager(logits, dtype, device, calibration),
    )


def _eager(logits: int, dtype: torch.dtype, device: Hardware, calibration: Calibration) -> KernelCost:
    """The fp32 copy, its log-softmax; then the gradients of both."""
    element, wide = dtype.itemsize, max(4, dtype.itemsize)
    cast = [element + wide] if element < 4 else []
    work = [Work(bytes_moved=size * logits) for size in (*cast, 2 * wide, 3 * wide, *cast)]
    saved_bytes = logits * wide
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=saved_bytes,
        # The log-softmax, its gradient, and that in the logits' dtype exist together.
        transient_bytes=saved_bytes + logits * wide + (logits * element if element < 4 else 0),
        seconds=seconds_of(work, dtype, device, calibration),
    )
