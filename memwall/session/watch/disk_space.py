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
_EVERY = 4
"""Steps from one look to the next: a look takes as long as all else that is watched."""
_SLOW_SECONDS, _TRIED = 0.2e-3, 8
"""Seconds that the fastest of the first looks may take: a disk of the network that takes longer is left alone then."""


class DiskSpaceWatch:
    """Looks at what is free where a run writes, every fourth step, and says once of each disk that it fills up.

    Args:
        places: returns folders on the disks; two may be on the same.
    """

    def __init__(self, places: Callable[[], tuple[str, ...]]) -> None:
        self._places = places
        self._disks: list[_Disk] | None = None
        self._num_steps = 0

    def begin_step(self) -> None:
        """Looks; to be called when a step begins."""
        self._num_steps += 1
        if self._num_steps % _EVERY:
            return
        if self._disks is None:
            folders = {os.stat(place).st_dev: place for place in self._places() if os.path.isdir(place)}
            self._disks = [_Disk(folder) for folder in folders.values()]
        self._disks = [disk for disk in self._disks if disk.looks_on()]


class _Disk:
    def __init__(self, folder: str) -> None:
        self._folder, self._rise = os.path.abspath(folder), EvenRise(_LEAST_BYTES, every=_EVERY)
        self._num_looks, self._fastest_seconds = 0, math.inf
        self._noted: dict[str, int] | None = None
        """Sizes that open files had at the last look, by name; None unless the disk fills up."""

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
        rise = self._rise.per_step()
        if rise is None or free_bytes > _SOON_STEPS * rise:
            self._noted = None
        elif self._noted is None:
            self._noted = open_file_bytes()
        else:
            self._say(self._noted, rise, free_bytes)
            return False
        return True

    def _say(self, before: dict[str, int], rise: float, free_bytes: int) -> None:
        grown = {name: now - before.get(name, now) for name, now in open_file_bytes().items()}
        name = max(grown, key=grown.__getitem__, default="")
        if name and grown[name] >= rise:
            cause = f"{name} has grown by {format_bytes(grown[name])} in {_EVERY} of them"
        else:
            cause = "no file that stays open grows: it is files that are written and closed, or another process"
        _log.warning(
            "the disk of %s has %s less free with each step, and is full in about %d of them; %s",
            self._folder,
            format_bytes(int(rise)),
            free_bytes // int(rise),
            cause,
        )
