"""What the operating system says this process holds. Linux's /proc where there is one, psutil elsewhere."""

import ctypes
import gc
import mmap
from pathlib import Path

import psutil

__all__ = ["process_bytes", "process_peak_bytes", "reset_process_peak", "return_free_memory"]

_STATUS = Path("/proc/self/status")
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = mmap.PAGESIZE
_CLEAR_REFS = Path("/proc/self/clear_refs")


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024  # proc_pid_status(5): these lines are in kB of 1024 bytes
    return 0


def process_bytes() -> int:
    """Resident bytes of this process now."""
    if _STATM.exists():
        return int(_STATM.read_bytes().split()[1]) * _PAGE_BYTES
    return int(psutil.Process().memory_info().rss)


def process_peak_bytes() -> int:
    """Highest resident bytes of this process since it started or since the last reset (VmHWM)."""
    return _status_bytes("VmHWM") if _STATUS.exists() else int(psutil.Process().memory_info().rss)


def reset_process_peak() -> bool:
    """Sets the high-water mark to the present resident bytes (proc_pid_clear_refs(5), value 5).

    Returns:
        False where the system does not allow it: then the peak is the one since the process started.
    """
    try:
        _CLEAR_REFS.write_text("5")
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
