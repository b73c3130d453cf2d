"""Peaks of a CUDA device's allocator: the script's and memwall's, of which each begins at its own reset.

torch has one set of peaks for the whole process. memwall begins a new one in each step: a script that asks for
`torch.cuda.max_memory_allocated` would then hear the last step's, and one that resets it hide a step's from memwall.
"""

from typing import Any

import torch
from msgspec import Struct

from memwall.patches import Patches

_WHY = "keeps a script's peaks of device memory apart from memwall's"
_CURRENT = ("reserved_bytes", "allocated_bytes")
_Statistics = dict[str, Any]


class AllocatorPeak(Struct, frozen=True, kw_only=True):
    """Holds what torch's caching allocator counts of a device."""

    active_bytes: int
    """Bytes of blocks that were in use at once, at most: those handed out, and those that a stream still reads."""
    allocated_bytes: int
    """Bytes of blocks that were handed out at once, at most."""
    reserved_bytes: int
    """Bytes of segments that were held at once, at most."""
    inactive_bytes: int
    """Bytes that were free between blocks in use, which no other size of segment could be made of, at most."""
    num_retries: int
    """Requests since the process began that were granted only after the cache had been given back."""

    def joined(self, other: "AllocatorPeak") -> "AllocatorPeak":
        """Returns the higher of each figure."""
        return AllocatorPeak(
            **{name: max(getattr(self, name), getattr(other, name)) for name in self.__struct_fields__}
        )


class SeparatePeaks:
    """Keeps both apart while anybody uses it; of a device all share one, see `begin`."""

    @classmethod
    def begin(cls, device: torch.device) -> "SeparatePeaks":
        """Keeps both apart from now on, until `undo` was called as often as this."""
        index = _index_of(device)
        found = _separate.get(index) or _separate.setdefault(index, cls(index))
        found._num_users += 1
        return found

    def __init__(self, index: int) -> None:
        self._index, self._num_users = index, 0
        self._read, self._reset = torch.cuda.memory_stats_as_nested_dict, torch.cuda.reset_peak_memory_stats
        self._own: _Statistics = {}
        self._script: _Statistics = {}
        self._patches = Patches(_WHY)
        for owner in (torch.cuda, torch.cuda.memory):
            self._patches.wrap(owner, "memory_stats_as_nested_dict", self._shown)
            self._patches.wrap(owner, "reset_peak_memory_stats", self._reset_by_script)

    def undo(self) -> None:
        """Leaves torch's own peaks to the script, as soon as nobody else keeps them apart."""
        self._num_users -= 1
        if not self._num_users:
            self._patches.undo()
            del _separate[self._index]

    def statistics(self) -> _Statistics:
        """Returns torch's statistics with the peaks since memwall's last reset."""
        return _raised(self._read(self._index), self._own)

    def read(self, device: torch.device) -> _Statistics:
        """Returns torch's statistics as they are."""
        found: _Statistics = self._read(device)
        return found

    def reset(self) -> None:
        """Begins memwall's peaks anew, and leaves the script's."""
        self._script = _raised(self._read(self._index), self._script)
        self._own = {}
        self._reset(self._index)

    def _shown(self, original: Any, device: Any = None) -> _Statistics:
        found: _Statistics = original(device)
        return _raised(found, self._script) if found and _index_of(device) == self._index else found

    def _reset_by_script(self, original: Any, device: Any = None) -> None:
        if _index_of(device) == self._index:
            self._own = self.statistics()
            self._script = {}
        original(device)


_separate: dict[int, SeparatePeaks] = {}


def allocator_peak(device: torch.device) -> AllocatorPeak:
    """Returns what the allocator held at most since memwall's last reset."""
    kept = _separate.get(_index_of(device))
    found = torch.cuda.memory_stats_as_nested_dict(device) if kept is None else kept.statistics()
    if not found:
        return AllocatorPeak(active_bytes=0, allocated_bytes=0, reserved_bytes=0, inactive_bytes=0, num_retries=0)
    peaks = {name: int(found[name]["all"]["peak"]) for name in ("active_bytes", "allocated_bytes", "reserved_bytes")}
    inactive_bytes = int(found["inactive_split_bytes"]["all"]["peak"])
    return AllocatorPeak(**peaks, inactive_bytes=inactive_bytes, num_retries=int(found["num_alloc_retries"]))


def segment_bytes(device: torch.device) -> tuple[int, int]:
    """Returns what torch's segments hold now, and what of that is handed out, by one read of all statistics.

    torch's own functions for one of them sort all names before, which takes ten times as long.
    """
    kept = _separate.get(_index_of(device))
    found = (torch.cuda.memory_stats_as_nested_dict if kept is None else kept.read)(device)
    reserved, allocated = (found[name]["all"]["current"] if found else 0 for name in _CURRENT)
    return int(reserved), int(allocated)


def reserved_peaks() -> dict[int, int]:
    """Returns the most bytes of segments that each device has held so far; nothing before CUDA is used."""
    if not torch.cuda.is_initialized():
        return {}
    devices = (torch.device("cuda", index) for index in range(torch.cuda.device_count()))
    return {device.index: allocator_peak(device).reserved_bytes for device in devices}


def reset_allocator_peak(device: torch.device) -> None:
    """Begins memwall's peaks of a device anew; where a session keeps them apart, the script's go on."""
    kept = _separate.get(_index_of(device))
    if kept is None:
        torch.cuda.reset_peak_memory_stats(device)
    else:
        kept.reset()


def _raised(statistics: _Statistics, kept: _Statistics) -> _Statistics:
    """Returns statistics in which no peak is lower than the one that was kept."""
    found: _Statistics = {}
    for name, value in statistics.items():
        if isinstance(value, dict):
            found[name] = _raised(value, kept.get(name, {}))
        else:
            found[name] = max(value, kept.get(name, 0)) if name == "peak" else value
    return found


def _index_of(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.cuda.current_device() if index is None else int(index)
