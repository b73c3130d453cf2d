"""Reads which filesystem holds a path, and who has stopped writes to it."""

import os
from pathlib import Path

_MOUNTINFO = Path("/proc/self/mountinfo")


def is_made_read_only(path: str | os.PathLike[str]) -> bool:
    """Returns whether the kernel has stopped writes to the filesystem of a path, as it does where a device fails.

    Whoever mounts a filesystem read-only has both its mount and the filesystem say so. The kernel changes the
    filesystem alone, to "ro" or, since Linux 6.15, to "emergency_ro".
    """
    found = mount_of(path)
    if found is None:
        return False
    mount, filesystem = found
    options = filesystem[-1].split(",")
    return "emergency_ro" in options or ("ro" in options and "rw" in mount[5].split(","))


def mount_of(path: str | os.PathLike[str]) -> tuple[list[str], list[str]] | None:
    """Returns the fields of a path's filesystem in proc_pid_mountinfo(5), before " - " and after it; None without."""
    try:
        mountinfo = _MOUNTINFO.read_text()
    except OSError:
        return None
    there = os.path.abspath(path)
    while not os.path.exists(there):  # one that could not be made is nowhere, but its parent is
        there = os.path.dirname(there)
    device = os.stat(there).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        if found and left.split()[2] == wanted:
            return left.split(), right.split(maxsplit=2)
    return None
