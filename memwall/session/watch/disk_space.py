"""Notices that a disk has less free with each step, before it is full, and names the open file that grows."""

import logging
import math
import os
import time
from collections.abc import Callable

from memwall.session.watch.even_rise import EvenRise
from memwall.session.watch.open_files import open_file_bytes
from memwall.units import format_bytes

__all__ = ["DiskSpaceWatch"]

_log = logging.getLogger(__name__)

_LEAST_BYTES = 32 << 20
_SOON_STEPS = 10_000
"""Steps after which a disk would be full, for that to be said: a run saves now and then, and disks are large."""
_STEPS_LATER = 3
_SLOW_SECONDS, _TRIED = 0.2e-3, 8
"""Seconds that the fastest of the first looks may take: a disk of the network that takes longer is left alone then."""


class DiskSpaceWatch:
    """Looks at what is free where a run writes, once a step, and says once of each disk that it fills up.

    Args:
        places: returns folders on the disks; two may be on the same.
    """

    def __init__(self, places: Callable[[], tuple[str, ...]]) -> None:
        self._places = places
        self._disks: list[_Disk] | None = None

    def begin_step(self) -> None:
        """Looks; to be called when a step begins."""
        if self._disks is None:
            folders = {os.stat(place).st_dev: place for place in self._places() if os.path.isdir(place)}
            self._disks = [_Disk(folder) for folder in folders.values()]
        self._disks = [disk for disk in self._disks if disk.looks_on()]


class _Disk:
    def __init__(self, folder: str) -> None:
        self._folder, self._rise = os.path.abspath(folder), EvenRise(_LEAST_BYTES)
        self._num_looks, self._fastest_seconds = 0, math.inf
        self._noted: dict[str, int] = {}
        """Sizes that open files had some steps ago, by name."""
        self._steps_left = -1
        """Steps until these are compared; negative while they are not noted."""

    def looks_on(self) -> bool:
        """Looks at the disk once; returns whether it is to be looked at again."""
        begin = time.perf_counter()
        try:
            found = os.statvfs(self._folder)
        except OSError:  # whoever writes there says more of it
            return False
        if self._num_looks < _TRIED:
            self._num_looks += 1
            self._fastest_seconds = min(self._fastest_seconds, time.perf_counter() - begin)
            if self._num_looks == _TRIED and self._fastest_seconds > _SLOW_SECONDS:
                return False
        free_bytes = found.f_bavail * found.f_frsize
        self._rise.add(-free_bytes)
        if self._steps_left > 0:
            self._steps_left -= 1
            return True
        rise = self._rise.per_step()
        if rise is None or free_bytes > _SOON_STEPS * rise:
            self._steps_left = -1
            return True
        if self._steps_left < 0:
            self._noted, self._steps_left = open_file_bytes(), _STEPS_LATER - 1
            return True
        self._say(rise, free_bytes)
        return False

    def _say(self, rise: float, free_bytes: int) -> None:
        grown = {name: now - self._noted.get(name, now) for name, now in open_file_bytes().items()}
        name = max(grown, key=grown.__getitem__, default="")
        if name and grown[name] >= rise:
            cause = f"{name} has grown by {format_bytes(grown[name])} in {_STEPS_LATER} of them"
        else:
            cause = "no file that stays open grows: it is files that are written and closed, or another process"
        _log.warning(
            "the disk of %s has %s less free with each step, and is full in about %d of them; %s",
            self._folder,
            format_bytes(int(rise)),
            free_bytes // int(rise),
            cause,
        )
