"""Notices that a run opens more files with each step, and names one of them."""

import logging
import os
import stat

from memwall.session.watch.even_rise import rise_per_step

__all__ = ["OpenFilesWatch", "open_file_bytes"]

_log = logging.getLogger(__name__)

_EVERY = 5
"""Steps from one look to the next: to list what is open takes longer than all else that is watched."""
_LEAST = 40


class OpenFilesWatch:
    """Counts what the process has open, every fifth step, and says once that it grows."""

    def __init__(self) -> None:
        self._numbers: list[float] = []
        self._num_steps, self._num_open = 0, -1
        self._open_before: set[str] = set()
        self._is_said = False

    def begin_step(self) -> None:
        """Looks; to be called when a step begins."""
        self._num_steps += 1
        if self._is_said or self._num_steps % _EVERY:
            return
        before, self._num_open = self._num_open, _num_open_files()
        self._numbers = [*self._numbers[-3:], float(self._num_open)]
        if self._num_open <= before:
            return  # as in nearly every step, and quickly found
        handles = _open_files()
        new = [name for name in handles.values() if name not in self._open_before]
        self._open_before = set(handles.values())
        rise = rise_per_step(self._numbers, 1, _LEAST)
        if rise is None:
            return
        self._is_said = True
        _log.warning(
            "open files grow by %.1f with each step: %d are open, among the latest is %s",
            rise / _EVERY,
            len(handles),
            new[-1] if new else list(handles.values())[-1],
        )


def open_file_bytes() -> dict[str, int]:
    """Returns what each file that this process has open takes of its disk, by name."""
    found = {}
    for number, name in _open_files().items():
        try:
            status = os.fstat(number)
        except OSError:  # closed since
            continue
        if stat.S_ISREG(status.st_mode):
            found[name] = status.st_blocks * 512
    return found


def _num_open_files() -> int:
    """Returns how many files this process has open; 0 where the system does not tell."""
    try:
        # Linux says it as the folder's size from 6.2 on; to list it takes a hundred times as long.
        return os.stat("/proc/self/fd").st_size or len(os.listdir("/proc/self/fd")) - 1  # that of the listing itself
    except OSError:
        return 0


def _open_files() -> dict[int, str]:
    """Returns what this process has open, by number of the handle; nothing where the system does not tell."""
    found = {}
    try:
        numbers = sorted(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        return {}
    for number in numbers:
        try:
            found[number] = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # that of the listing itself
            continue
    return found
