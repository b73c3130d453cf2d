"""Measures in some 50 ms how fast this machine's memory is copied, and becomes resident."""

import ctypes
import mmap
import resource
import time

import torch

from memwall.store.page_map import PageMap

_NUM_COPIES = 5
_NUM_TOUCHES = 3
_PROBE_BYTES = 16 << 20


def copy_seconds_per_byte() -> float:
    """Measures one copy between warm buffers, as from a tensor into staging."""
    source, target = (torch.ones(4 << 20, dtype=torch.uint8, device="cpu") for _ in range(2))
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
    times = [_touched_in_huge_pages() if in_huge_pages else _touched() for _ in range(_NUM_TOUCHES)]
    # Of each the fastest: a second touch that something else held up would hide what the first one took.
    seconds = min(first for first, _ in times) - min(again for _, again in times)
    return max(seconds, 0.0) / _PROBE_BYTES


def kernel_seconds() -> float:
    """Returns what the kernel has computed for this thread so far, as where pages became resident; 0 where unknown."""
    whose = getattr(resource, "RUSAGE_THREAD", None)  # on Linux alone
    return 0.0 if whose is None else resource.getrusage(whose).ru_stime


def _touched() -> tuple[float, float]:
    with mmap.mmap(-1, _PROBE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as region:
        buffer = ctypes.c_char.from_buffer(region)
        found = _touch_seconds(ctypes.addressof(buffer))
        del buffer
    return found


def _touched_in_huge_pages() -> tuple[float, float]:
    pages = PageMap(_PROBE_BYTES)
    found = _touch_seconds(pages.address)
    pages.drop_pages()
    return found


def _touch_seconds(address: int) -> tuple[float, float]:
    """Returns what writing to the probe's bytes takes at first, and again."""
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        ctypes.memset(address, 1, _PROBE_BYTES)
        seconds.append(time.perf_counter() - begin)
    return seconds[0], seconds[1]
