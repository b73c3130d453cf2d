"""What `rope` costs, beside eager `x * cos + rotate_half(x) * sin`: pure arithmetic."""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from .cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of

__all__ = ["RopeShape", "cost"]

# Elements read and written by each operation of eager code for one of x. Forward: times cos, negated half, the halves
# put together, times sin, sum. Backward: times both tables, two halves into zeros, one negated, three sums.
_EAGER_FORWARD = (2.0, 1.0, 2.0, 2.0, 3.0)
_EAGER_BACKWARD = (2.0, 2.0, 2.0, 1.0, 2.0, 3.0, 3.0)


class RopeShape(Struct, frozen=True, kw_only=True):
    """One call of `rope`: queries, or keys."""

    num_tokens: int
    """Batch and sequence."""
    num_heads: int
    head_dim: int
    rotary_dim: int | None = None
    """Features that are rotated; None is all of them."""
    inplace: bool = False
    table_bytes: int = 4
    """Of one number of cos and sin."""


def cost(
    shape: RopeShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Forward and backward. Nothing is saved but the tables, which live anyway.

    Raises:
        UsageError: a size is negative or does not fit, or the device has no rate for the dtype.
    """
    rotary_dim = shape.head_dim if shape.rotary_dim is None else shape.rotary_dim
    if min(shape.num_tokens, shape.num_heads, rotary_dim) < 0 or rotary_dim > shape.head_dim:
        raise UsageError(f"rope has no cost for {shape}; sizes must not be negative, rotary_dim not above head_dim")
    heads = shape.num_tokens * shape.num_heads
    tensor_bytes = heads * shape.head_dim * dtype.itemsize
    # Both tables, half of rotary_dim each.
    tables_bytes = shape.num_tokens * rotary_dim * shape.table_bytes
    forward_bytes = heads * rotary_dim * dtype.itemsize if shape.inplace else tensor_bytes
    work = [Work(bytes_moved=2 * size + tables_bytes) for size in (forward_bytes, tensor_bytes)]
    eager = [Work(bytes_moved=int(count * tensor_bytes)) for count in (*_EAGER_FORWARD, *_EAGER_BACKWARD)]
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=0,
        # In place only backward makes a tensor, the gradient.
        transient_bytes=tensor_bytes,
        seconds=seconds_of(work, dtype, device, calibration),
        eager=KernelCost(
            bytes_moved=sum(part.bytes_moved for part in eager),
            flops=0,
            saved_bytes=0,
            transient_bytes=3 * tensor_bytes,
            seconds=seconds_of(eager, dtype, device, calibration),
        ),
    )
