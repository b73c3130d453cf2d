"""Asks what other processes hold on a CUDA device, as its driver's management library (NVML) tells.

It lists processes with their bytes. In a container with process numbers of its own this process may be missing from the
list, or the list be empty: then what was in use before this process had a context there is other processes', and where
nobody has looked by then nothing is known.
"""

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

_SUCCESS = 0
_NOT_TOLD = (1 << 64) - 1
_MOST_PROCESSES = 256


class _Process(ctypes.Structure):
    """Mirrors nvmlProcessInfo_t."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class _Memory(ctypes.Structure):
    """Mirrors nvmlMemory_v2_t, in which what the driver reserves for itself is no memory in use."""

    _fields_ = (
        ("version", ctypes.c_uint),
        *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used")),
    )


_before: dict[str, int] = {}
"""Holds what was in use on each device, by its UUID, before this process had a context there."""


def note_sharers() -> None:
    """Notes what is in use on all devices, unless this process has memory of one already."""
    if torch.cuda.is_initialized() and any(map(torch.cuda.memory_reserved, range(torch.cuda.device_count()))):
        return
    library, count = _library(), ctypes.c_uint()
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        memory = _Memory(version=ctypes.sizeof(_Memory) | 2 << 24)
        if (
            library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == _SUCCESS
            and library.nvmlDeviceGetUUID(handle, uuid, ctypes.c_uint(len(uuid))) == _SUCCESS
            and library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) == _SUCCESS
        ):
            _before[uuid.value.decode()] = int(memory.used)


def others_bytes(device: torch.device) -> int | None:
    """Returns the bytes that other processes hold on a CUDA device; None where that is not told."""
    uuid = f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', '')}"  # AMD's devices have none there
    found = _used_bytes(uuid)
    if found is None:
        return _before.get(uuid)
    own = found.pop(os.getpid(), None)
    if own is None and torch.cuda.memory_reserved(device):
        # This process is one of them, under a number that it does not know.
        return 0 if len(found) == 1 else _before.get(uuid)
    return sum(found.values())


def _used_bytes(uuid: str) -> dict[int, int] | None:
    """Returns the bytes of each process on a device, by its number; None where the driver does not say."""
    library, handle = _library(), ctypes.c_void_p()
    if library is None or library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)) != _SUCCESS:
        return None
    found: dict[int, int] = {}
    for kind in ("Compute", "Graphics"):
        ask = getattr(library, f"nvmlDeviceGet{kind}RunningProcesses_v3", None)
        if ask is not None:
            found.update(_listed(ask, handle))
    return None if not found or _NOT_TOLD in found.values() else found


def _listed(ask: Any, handle: ctypes.c_void_p) -> Iterator[tuple[int, int]]:
    count, processes = ctypes.c_uint(_MOST_PROCESSES), (_Process * _MOST_PROCESSES)()
    if ask(handle, ctypes.byref(count), processes) == _SUCCESS:
        yield from ((one.pid, one.used_bytes) for one in processes[: count.value])


@cache
def _library() -> ctypes.CDLL | None:
    """Returns NVIDIA's library, ready to be asked; None where there is none, as on AMD's devices."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == _SUCCESS else None
    except (OSError, AttributeError):
        return None
