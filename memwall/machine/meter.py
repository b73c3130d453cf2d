"""The bytes that a process holds: of the machine, as the system says, or of a CUDA device, as its meter shows."""

import ctypes
import gc
import mmap
import os
import resource
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from memwall.machine.device_peaks import AllocatorPeak, allocator_peak, reset_allocator_peak
from memwall.machine.device_sharers import others_bytes

_STATUS = "/proc/self/status"
_STATM = "/proc/self/statm"
_MOST_ASKED = 8
"""Times that an answer is given without a read of its own."""
_MOST_SAID_BYTES = 8192
_PAGE_BYTES = mmap.PAGESIZE
_CLEAR_REFS = "/proc/self/clear_refs"


_kept: list[int] = []
"""The open file of `_status`, if there is one."""


def _read(path: str) -> bytes:
    """Returns what the kernel says in one read."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(file, _MOST_SAID_BYTES)
    finally:
        os.close(file)


def _status() -> bytes:
    """Returns what the kernel says of this process, in each step from a file that stays open: to open it takes longer.

    After a fork that file is the parent's, and a daemon that closes what it finds open may have given its number to
    another file: what is read has to be about this process.
    """
    if _kept:
        try:
            text = os.pread(_kept[0], _MOST_SAID_BYTES, 0)
        except OSError:
            text = b""
        if b"\nPid:\t%d\n" % os.getpid() in text:
            return text
    _kept[:] = [os.open(_STATUS, os.O_RDONLY | os.O_CLOEXEC)]
    return os.pread(_kept[0], _MOST_SAID_BYTES, 0)


def _said_bytes(status: bytes, name: bytes) -> int:
    """Returns a figure of the process's memory (proc_pid_status(5): in kB of 1024 bytes); 0 where there is none."""
    _, _, rest = status.partition(name)
    return int(rest.split(maxsplit=1)[0]) * 1024 if rest else 0


def process_bytes() -> int:
    """Returns the resident bytes of this process."""
    try:
        return int(_read(_STATM).split(maxsplit=2)[1]) * _PAGE_BYTES
    except FileNotFoundError:
        return _bytes_elsewhere()


def mapped_bytes() -> int:
    """Returns the part of these that are pages of files, which the system takes back; 0 where it does not tell.

    Shared memory is none of them, though /proc/self/statm counts it so: a batch of a data loader's worker lies there.
    """
    try:
        return _said_bytes(_status(), b"RssFile:")
    except FileNotFoundError:
        return 0


def _bytes_elsewhere() -> int:
    """Returns the resident bytes on a system without /proc."""
    import psutil  # half a MiB that Linux needs not

    return int(psutil.Process().memory_info().rss)


def process_peak_bytes() -> int:
    """Returns the highest resident bytes of this process since it started or since the last reset (VmHWM)."""
    try:
        return _said_bytes(_status(), b"VmHWM:")
    except FileNotFoundError:
        return _bytes_elsewhere()


def reset_process_peak() -> bool:
    """Sets the high-water mark to the present resident bytes (proc_pid_clear_refs(5), value 5).

    Returns:
        False where the system does not allow it: then the peak is the one since the process started.
    """
    try:
        file = os.open(_CLEAR_REFS, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(file, b"5")
        finally:
            os.close(file)
    except OSError:
        return False
    return True


def return_free_memory(*, generation: int = 2) -> None:
    """Collects Python's cycles and, with glibc, returns the heap's free pages, so that resident means in use.

    Args:
        generation: the oldest of Python's generations that is collected (gc.collect). All of them take 0.2 s in a
            process that has imported torch, those up to 1 a few milliseconds.
    """
    gc.collect(generation)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeldBytes(NamedTuple):
    """Holds what a process holds at one moment, in bytes."""

    standing_bytes: int
    """Counts what the run holds now: of a device in tensors, for what its segments have free is no growth."""
    peak_bytes: int
    """Counts what was held at most since the last reset."""


class HostMeter:
    """Reads the resident bytes of the process."""

    device = "cpu"
    now_bytes = staticmethod(process_bytes)
    peak_bytes = staticmethod(process_peak_bytes)

    def __init__(self) -> None:
        self._read_at, self._held, self._num_asked = 0, HeldBytes(0, 0), 0
        """Keep the page faults of this process until the last read, what that said, and how often it was told since."""

    def reset_peak(self) -> bool:
        """Begins a new peak; returns False where that is not possible."""
        self._read_at = 0
        return reset_process_peak()

    def held(self) -> HeldBytes:
        """Returns what is held now and was at most: of one read of the system's, or of the last while no page came in.

        Little else makes a process larger, as huge pages do that the system puts together by itself; for that the
        system is read again now and then. Where it counts no faults at all (gVisor) it always is. What the process has
        let go of meanwhile counts as standing until the next read.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        num_faults = usage.ru_minflt + usage.ru_majflt
        self._num_asked += 1
        if num_faults and num_faults == self._read_at and self._num_asked < _MOST_ASKED:
            return self._held
        self._num_asked = 0
        try:
            text = _status()
        except FileNotFoundError:
            return HeldBytes(_bytes_elsewhere(), _bytes_elsewhere())
        self._read_at, self._held = num_faults, HeldBytes(_said_bytes(text, b"VmRSS:"), _said_bytes(text, b"VmHWM:"))
        return self._held

    def allocator_peak(self) -> None:
        """Nothing: malloc says less of itself than the system does."""

    def base_bytes(self, tensor_bytes: int) -> int:
        """Returns what is held beside tensors of so many bytes, and what malloc keeps free: to be returned before."""
        return process_bytes() - tensor_bytes

    def others_bytes(self) -> None:
        """Returns nothing: resident bytes are those of this process alone."""


class CudaMeter:
    """Reads what this process has in use on a CUDA device: torch's segments, and context, kernels and libraries.

    Where it is not told what other processes hold there, that counts as this one's.
    """

    device = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.place = device
        self._asked_at_bytes = -1
        self._others_bytes: int | None = None

    def now_bytes(self) -> int:
        """Returns what is held now."""
        return torch.cuda.memory_reserved(self.place) + self._beside_bytes()

    @cached_property
    def total_bytes(self) -> int:
        """Returns what the device has."""
        return int(torch.cuda.get_device_properties(self.place).total_memory)

    def others_bytes(self) -> int | None:
        """Returns what other processes hold there, which no figure of this meter counts; None where nobody tells."""
        self._beside_bytes()
        return self._others_bytes

    def held(self) -> HeldBytes:
        return HeldBytes(torch.cuda.memory_allocated(self.place), self.peak_bytes())

    def peak_bytes(self) -> int:
        """Returns the segments' peak since the last reset, and what is beside them, which only grows."""
        return self._beside_bytes() + self.allocator_peak().reserved_bytes

    def allocator_peak(self) -> AllocatorPeak:
        """Returns what torch's caching allocator counts since that reset."""
        return allocator_peak(self.place)

    def reset_peak(self) -> bool:
        reset_allocator_peak(self.place)
        return True

    def base_bytes(self, tensor_bytes: int) -> int:
        """Returns what is beside segments, which hold all tensors: what they keep free is no part of it."""
        return self._beside_bytes()

    def _beside_bytes(self) -> int:
        """Returns what is in use beside segments of this process, and asks whose it is whenever that has changed."""
        free_bytes, total_bytes = torch.cuda.mem_get_info(self.place)
        in_use_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(self.place)
        if in_use_bytes != self._asked_at_bytes:
            self._asked_at_bytes, self._others_bytes = in_use_bytes, others_bytes(self.place)
        return max(0, in_use_bytes - (self._others_bytes or 0))


Meter = HostMeter | CudaMeter


def meter_of(*models: nn.Module) -> Meter:
    """Returns the meter of the device that the models' first parameter is on."""
    device = next((parameter.device for model in models for parameter in model.parameters()), torch.device("cpu"))
    return CudaMeter(device) if device.type == "cuda" else HostMeter()
