"""Describes what of a device decides which kernels torch launches there and what they allocate."""

from typing import NamedTuple

from memwall.machine.hardware import Hardware
from memwall.predict.cuda.reductions import Multiprocessors

# What a capability has that hardware.toml does not list.
_OTHERWISE_THREADS = 2048


class CudaDevice(NamedTuple):
    """Describes a device as torch's kernels ask for it."""

    capability: tuple[int, int]
    """Compute capability, as torch.cuda.get_device_capability returns it."""
    multiprocessors: Multiprocessors | None
    """None under ROCm, where kernels split their work by other rules."""

    @property
    def is_rocm(self) -> bool:
        """Tells whether torch runs its ROCm kernels there: other attention kernels, other libraries."""
        return self.multiprocessors is None


def cuda_device_of(hardware: Hardware) -> CudaDevice:
    """Returns the device as torch's kernels see it."""
    major, _, minor = hardware.compute_capability.partition(".")
    capability = (int(major), int(minor))
    if hardware.product.startswith("AMD"):
        return CudaDevice(capability, None)
    threads = hardware.max_threads_per_multiprocessor or _OTHERWISE_THREADS
    return CudaDevice(capability, Multiprocessors(hardware.num_multiprocessors, threads))
