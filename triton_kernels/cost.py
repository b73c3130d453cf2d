"""What a kernel costs, as a record to compare: bytes, FLOPs, seconds; no GPU and no triton needed.

Seconds are those of a device that runs at its data sheet's peaks, times the efficiencies that a calibration measured
there. Without a calibration they are a lower bound, never a measurement.
"""

import torch
from msgspec import Struct

from memwall.errors import UsageError
from memwall.machine.hardware import Dtype, Hardware

__all__ = ["UNCALIBRATED", "Calibration", "KernelCost", "Work", "seconds_of"]

_NAMES: dict[torch.dtype, Dtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


class Calibration(Struct, frozen=True, kw_only=True):
    """How much of the data sheet a device delivers."""

    copy_efficiency: float = 1.0
    """Measured copy bandwidth over the data sheet's."""
    matmul_efficiency: float = 1.0
    """Measured rate of a large matmul over the data sheet's."""
    launch_seconds: float = 0.0
    """Of one kernel that has nothing to do."""


UNCALIBRATED = Calibration()
"""A device that runs at its data sheet's peaks."""


class KernelCost(Struct, frozen=True, kw_only=True):
    """Forward and backward of one operation, once."""

    bytes_moved: int
    """Read and written in device memory."""
    flops: int
    """Of matmuls; element-wise work is counted by its bytes."""
    saved_bytes: int
    """Held from the end of forward to backward, inputs that live anyway not counted."""
    transient_bytes: int
    """At the operation's own peak, beyond its inputs: `saved_bytes`, scratch and results included."""
    seconds: float
    eager: "KernelCost | None" = None
    """The same work by plain torch operations, on the same device."""


class Work(Struct, frozen=True, kw_only=True):
    """One kernel's share: it is bound by one of the two."""

    bytes_moved: int
    flops: int = 0
    num_launches: int = 1


def seconds_of(work: list[Work], dtype: torch.dtype, device: Hardware, calibration: Calibration) -> float:
    """Seconds of kernels that run one after the other.

    Raises:
        UsageError: the device has no figure for that dtype.
    """
    name = _NAMES.get(dtype)
    if name is None or name not in device.flops:
        known = ", ".join(device.flops)
        raise UsageError(f"no rate is known for {dtype} on {device.name}; known are {known}")
    rate = device.flops[name] * calibration.matmul_efficiency
    bandwidth = device.memory_bytes_per_second * calibration.copy_efficiency
    return sum(
        max(part.bytes_moved / bandwidth, part.flops / rate) + part.num_launches * calibration.launch_seconds
        for part in work
    )
