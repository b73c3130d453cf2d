"""What a step of `FusedAdamW` costs, beside torch's own operator by operator: pure arithmetic."""

from typing import Literal

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Hardware

from .._configs import ADAMW_CHUNK
from ..cost import UNCALIBRATED, Calibration, KernelCost, Work, seconds_of
from ._terms import QUANTISED_ELEMENTS

__all__ = ["AdamWShape", "cost"]


class AdamWShape(Struct, frozen=True, kw_only=True):
    """One step over all parameters of an optimizer."""

    num_elements: int
    """Of all parameters together."""
    moment_bits: Literal[8, 32] = 32
    """8 as if every tensor were quantised; small ones are not."""
    clips: bool = False
    """With `max_norm`."""


def cost(
    shape: AdamWShape, dtype: torch.dtype, device: Hardware, *, calibration: Calibration = UNCALIBRATED
) -> KernelCost:
    """A step of parameters and gradients in `dtype`.

    `saved_bytes` are the moments, which live from step to step. `transient_bytes` are the tables that a launch reads;
    addresses, 72 bytes for each tensor, are left out. `eager` is `torch.optim.AdamW(foreach=True)`, whose moments have
    the dtype of the parameter, after `torch.nn.utils.clip_grad_norm_` where gradients are clipped.

    Raises:
        UsageError: the size is negative, or the device has no rate for the dtype.
    """
    if shape.num_elements < 0:
        raise UsageError(f"FusedAdamW has no cost for {shape}; sizes must not be negative")
    tensor_bytes = shape.num_elements * dtype.itemsize
    moment_bytes = _moment_bytes(shape, dtype)
    num_programs = -(-shape.num_elements // ADAMW_CHUNK)
    work = [Work(bytes_moved=3 * tensor_bytes + 2 * moment_bytes + 4 * num_programs)]
    if shape.clips:
        # Sums of fp64 are written and added up.
        work += [Work(bytes_moved=tensor_bytes + 12 * num_programs), Work(bytes_moved=8 * num_programs)]
    # Decay, first moment, second moment twice, root, correction, eps, update; then norm and scaling.
    eager_tensors = [2, 3, 2, 3, 2, 2, 2, 4, *([1, 2] if shape.clips else [])]
    eager = [Work(bytes_moved=count * tensor_bytes) for count in eager_tensors]
    return KernelCost(
        bytes_moved=sum(part.bytes_moved for part in work),
        flops=0,
        saved_bytes=moment_bytes,
        transient_bytes=(12 if shape.clips else 4) * num_programs,
        seconds=seconds_of(work, dtype, device, calibration),
        eager=KernelCost(
            bytes_moved=sum(part.bytes_moved for part in eager),
            flops=0,
            saved_bytes=2 * tensor_bytes,
            # The root of the second moment.
            transient_bytes=tensor_bytes,
            seconds=seconds_of(eager, dtype, device, calibration),
        ),
    )


def _moment_bytes(shape: AdamWShape, dtype: torch.dtype) -> int:
    """Of both."""
    if shape.moment_bits == 8:
        return 2 * (shape.num_elements + 4 * -(-shape.num_elements // QUANTISED_ELEMENTS))
    return 2 * shape.num_elements * max(4, dtype.itemsize)
