"""What `pack` and `unpack` cost, beside plain torch that does the same: pure arithmetic."""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from ..cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of
from ._terms import BLOCK_ELEMENTS

__all__ = ["PackShape", "cost"]


class PackShape(Struct, frozen=True, kw_only=True):
    """One tensor, packed in forward and unpacked in backward."""

    num_elements: int


def cost(
    shape: PackShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """Both ways, on the device; what the link takes is not in it. `saved_bytes` are what is left of the tensor.

    A tensor whose leading dimensions have no common stride costs a copy on top.

    Raises:
        UsageError: the size is negative, or the device has no rate for the dtype.
    """
    if shape.num_elements < 0:
        raise UsageError(f"pack has no cost for {shape}; sizes must not be negative")
    wide = max(4, dtype.itemsize)
    tensor_bytes = shape.num_elements * dtype.itemsize
    packed_bytes = shape.num_elements + -(-shape.num_elements // BLOCK_ELEMENTS) * wide
    work = [Work(bytes_moved=tensor_bytes + packed_bytes)] * 2
    # Cast, magnitudes, largest, scaled, rounded, codes; then codes cast, multiplied, rounded to the dtype.
    wide_bytes = shape.num_elements * wide
    cast = [tensor_bytes + wide_bytes] if wide > dtype.itemsize else []
    sizes = [*cast, 2 * wide_bytes, wide_bytes, 2 * wide_bytes, 2 * wide_bytes, wide_bytes + packed_bytes]
    sizes += [packed_bytes + wide_bytes, 2 * wide_bytes, *cast]
    eager = [Work(bytes_moved=size) for size in sizes]
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=packed_bytes,
        # In forward beside the tensor, in backward with the tensor again.
        transient_bytes=packed_bytes + tensor_bytes,
        seconds=seconds_of(work, dtype, device, calibration),
        eager=KernelCost(
            bytes_moved=sum(part.bytes_moved for part in eager),
            flops=0,
            saved_bytes=packed_bytes,
            transient_bytes=2 * wide_bytes + max(tensor_bytes, packed_bytes),
            seconds=seconds_of(eager, dtype, device, calibration),
        ),
    )
