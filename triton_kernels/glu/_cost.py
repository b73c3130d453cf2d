"""What `swiglu` and `geglu` cost, beside eager `activation(gate) * up`: pure arithmetic."""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from ..cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of

__all__ = ["GluShape", "cost"]


class GluShape(Struct, frozen=True, kw_only=True):
    """One call of `swiglu` or `geglu`."""

    num_rows: int
    """Tokens."""
    num_columns: int
    """Of the product."""
    rebuilds_product: bool = False
    """Inside `recompute_handles`, followed by layers that keep the product for nothing but their own backward."""


def cost(
    shape: GluShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Forward and backward, and the rebuild where there is one.

    `saved_bytes` are gate, up and what the layer that follows keeps of the product. A tensor whose leading dimensions
    have no common stride costs a copy on top.

    Raises:
        UsageError: a size is negative, or the device has no rate for the dtype.
    """
    if min(shape.num_rows, shape.num_columns) < 0:
        raise UsageError(f"glu has no cost for {shape}; sizes must not be negative")
    tensor_bytes = shape.num_rows * shape.num_columns * dtype.itemsize
    forward, backward = Work(bytes_moved=3 * tensor_bytes), Work(bytes_moved=5 * tensor_bytes)
    rebuild = [forward] if shape.rebuilds_product else []
    eager = [Work(bytes_moved=size * tensor_bytes) for size in (2, 3, 3, 3, 3)]
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in (forward, backward, *rebuild)),
        flops=0,
        saved_bytes=(2 if shape.rebuilds_product else 3) * tensor_bytes,
        # In backward: gate, up and their gradients.
        transient_bytes=4 * tensor_bytes,
        seconds=seconds_of([forward, backward, *rebuild], dtype, device, calibration),
        eager=KernelCost(
            # Activate, multiply; gradients of both factors, then of the activation.
            bytes_moved=sum(part.bytes_moved for part in eager),
            flops=0,
            # The activated gate as well.
            saved_bytes=4 * tensor_bytes,
            transient_bytes=5 * tensor_bytes,
            seconds=seconds_of(eager, dtype, device, calibration),
        ),
    )
