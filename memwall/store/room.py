"""The budget of a CUDA device, held by torch's own allocator: it frees what it keeps before it takes more, or raises.

The first steps under a plan may need more than was foreseen, which a plan that follows them makes up for. They are not
to end the run: what finds no memory within the budget is given it (`with_room`).
"""

import logging
import re
from collections.abc import Callable
from typing import TypeVar

import torch

from memwall.patches import Patches
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

_T = TypeVar("_T")

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
# torch 2.11, c10/cuda/CUDACachingAllocator.cpp and c10/core/impl/alloc_cpu.cpp; numpy 2, _ArrayMemoryError.
_ASKED = re.compile(r"(?:[Tt]ried to allocate|Unable to allocate) ([\d.]+) (bytes|KiB|MiB|GiB)")
# What torch takes for a request (torch 2.13, c10/core/AllocatorConfig.h): a segment of this size below 10 MiB, from
# there on the request in whole pages.
_SEGMENT_BYTES, _OWN_SEGMENT_BYTES, _PAGE_BYTES = 20 << 20, 10 << 20, 2 << 20


def asked_bytes_of(error: BaseException) -> int:
    """Returns what a failure to get memory says that was asked for; 0 where it does not."""
    found = _ASKED.search(str(error))
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0


class CudaLimit:
    """Holds the segments of one device to what a budget leaves for them; `lift` gives the allocator back as it was."""

    def __init__(self) -> None:
        self._patches = Patches("holds the CUDA allocator to the budget")
        self.place: torch.device | None = None
        """The device that a limit is set on; None where none is."""
        self.has_yielded = False
        """Whether it was raised since it was set."""
        self._before = 1.0

    def hold(self, device: torch.device, num_bytes: int) -> None:
        """Sets the limit in place of the last one. To be called between steps.

        A lower one that the script has set itself stays.

        Args:
            num_bytes: the most that torch's segments may take of the device.
        """
        self.lift()
        self._before = torch.cuda.get_per_process_memory_fraction(device)
        if num_bytes < self._before * _total_bytes(device):
            self._set(device, max(0, num_bytes))

    def give(self, error: torch.OutOfMemoryError) -> bool:
        """Raises the limit by what could not be had within it; returns False where the device itself has no more."""
        if self.place is None:
            return False
        device, asked_bytes = self.place, asked_bytes_of(error)
        pages = -(-asked_bytes // _PAGE_BYTES)
        segment_bytes = _SEGMENT_BYTES if asked_bytes < _OWN_SEGMENT_BYTES else pages * _PAGE_BYTES
        wanted_bytes = torch.cuda.memory_reserved(device) + segment_bytes
        if wanted_bytes <= self._limit_bytes or torch.cuda.mem_get_info(device)[0] < segment_bytes:
            return False
        self.lift()
        self._set(device, min(wanted_bytes, int(self._before * _total_bytes(device))))
        self.has_yielded = True
        return True

    def lift(self) -> None:
        """Takes the limit back, where it is still this one."""
        self.place, self.has_yielded = None, False
        self._patches.undo()

    def begin_giving(self) -> None:
        """Has what fails for want of memory, within `with_room`, succeed beyond the limit from now on."""
        _giving.append(self)

    def end_giving(self) -> None:
        """Ends that. Safe to call twice."""
        _giving[:] = [limit for limit in _giving if limit is not self]

    def _set(self, device: torch.device, limit_bytes: int) -> None:
        torch.cuda.set_per_process_memory_fraction(limit_bytes / _total_bytes(device), device)
        # Of a whole number of bytes, which may be another fraction than was set.
        own, before = torch.cuda.get_per_process_memory_fraction(device), self._before

        def lift() -> None:
            if torch.cuda.get_per_process_memory_fraction(device) == own:
                torch.cuda.set_per_process_memory_fraction(before, device)

        self._patches.add("setting", f"the fraction of {device} that torch takes", lift)
        self.place, self._limit_bytes = device, limit_bytes
        _log.debug("torch takes at most %s of %s", format_bytes(limit_bytes, rounding="down"), device)


_giving: list[CudaLimit] = []
"""Limits that give way for now."""


def with_room(
    make: Callable[[], _T],
    *,
    before_again: Callable[[], object] = lambda: None,
    make_room: Callable[[torch.OutOfMemoryError], bool] = lambda _: False,
) -> _T:
    """Returns what a function does, which is called once more wherever a limit gives way to what it lacked.

    Args:
        make: may be called several times.
        before_again: puts back what a call that failed has changed.
        make_room: makes room otherwise where none gives way, and tells whether to try again.
    """
    while True:
        try:
            return make()
        except torch.OutOfMemoryError as error:
            if not any(limit.give(error) for limit in _giving) and not make_room(error):
                raise
        before_again()


def cuda_room_bytes(device: torch.device) -> int:
    """Returns the bytes that tensors may still take within the fraction of a device that torch is held to.

    What lies free between blocks in use does not count: other sizes may not fit there, and it cannot be given back.
    """
    limit_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * _total_bytes(device))
    in_pieces = int(torch.cuda.memory_stats(device).get("inactive_split_bytes.all.current", 0))
    return limit_bytes - torch.cuda.memory_allocated(device) - in_pieces


def cuda_segment_room_bytes(device: torch.device) -> int:
    """Returns the bytes of segments that torch may still take of a device, within the fraction that it is held to."""
    limit_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * _total_bytes(device))
    return min(limit_bytes - torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0])


def _total_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
