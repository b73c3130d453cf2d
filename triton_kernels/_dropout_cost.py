"""What `dropout` costs, beside torch's own, which keeps a mask of a byte for each element: pure arithmetic."""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from .cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of

__all__ = ["DropoutShape", "cost"]

_SEED_BYTES = 8


class DropoutShape(Struct, frozen=True, kw_only=True):
    """One call of `dropout` that drops something."""

    num_elements: int
    adds_residual: bool = False


def cost(
    shape: DropoutShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Forward and backward. Tensors whose leading dimensions have no common stride cost a copy on top.

    Raises:
        UsageError: the size is negative, or the device has no rate for the dtype.
    """
    if shape.num_elements < 0:
        raise UsageError(f"dropout has no cost for {shape}; sizes must not be negative")
    tensor_bytes = shape.num_elements * dtype.itemsize
    work = [Work(bytes_moved=(3 if shape.adds_residual else 2) * tensor_bytes), Work(bytes_moved=2 * tensor_bytes)]
    mask_bytes = shape.num_elements
    eager = [Work(bytes_moved=2 * tensor_bytes + mask_bytes), Work(bytes_moved=2 * tensor_bytes + mask_bytes)]
    if shape.adds_residual:
        eager.append(Work(bytes_moved=3 * tensor_bytes))
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=_SEED_BYTES,
        transient_bytes=tensor_bytes + _SEED_BYTES,
        seconds=seconds_of(work, dtype, device, calibration),
        eager=KernelCost(
            bytes_moved=sum(part.bytes_moved for part in eager),
            flops=0,
            saved_bytes=mask_bytes,
            # With a residual: what was not dropped, beside the sum.
            transient_bytes=(2 if shape.adds_residual else 1) * tensor_bytes + mask_bytes,
            seconds=seconds_of(eager, dtype, device, calibration),
        ),
    )
