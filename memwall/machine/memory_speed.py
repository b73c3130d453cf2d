"""Measures in some 50 ms how fast this machine's memory is copied, and becomes resident."""

import ctypes
import mmap
import time

import torch

from memwall.store.page_map import PageMap

__all__ = ["copy_seconds_per_byte", "fault_seconds_per_byte"]

_NUM_COPIES = 5
_PROBE_BYTES = 16 << 20


def copy_seconds_per_byte() -> float:
    """Measures one copy between warm buffers, as from a tensor into staging."""
    source, target = torch.ones(4 << 20, dtype=torch.uint8), torch.ones(4 << 20, dtype=torch.uint8)
    best_seconds = float("inf")
    for _ in range(_NUM_COPIES):
        begin = time.perf_counter()
        target.copy_(source)
        best_seconds = min(best_seconds, time.perf_counter() - begin)
    return best_seconds / source.numel()


def fault_seconds_per_byte(*, in_huge_pages: bool = False) -> float:
    """Measures what touching memory that is not resident costs beyond touching it at all; takes about 30 ms.

    Args:
        in_huge_pages: where memory begins at the boundary of one, and the system is asked for them; else as malloc
            gets it.
    """
    best_seconds = float("inf")
    for _ in range(3):
        if in_huge_pages:
            pages = PageMap(_PROBE_BYTES)
            best_seconds = min(best_seconds, _first_touch_seconds(pages.address, _PROBE_BYTES))
            pages.drop_pages()
        else:
            with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
                buffer = ctypes.c_char.from_buffer(region)
                best_seconds = min(best_seconds, _first_touch_seconds(ctypes.addressof(buffer), _PROBE_BYTES))
                del buffer
    return best_seconds / _PROBE_BYTES


def _first_touch_seconds(address: int, num_bytes: int) -> float:
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        ctypes.memset(address, 1, num_bytes)
        seconds.append(time.perf_counter() - begin)
    return max(seconds[0] - seconds[1], 0.0)
