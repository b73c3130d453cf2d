"""A small ext4 in a loop device, parts of which can be cut off under a run; a part of benchmarks/faults.py.

Behind the cut the device has no blocks any more: the kernel reads and writes them in vain and returns EIO, of data as
of the file system's own. What lies before it stays readable.
"""

import ctypes
import fcntl
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["SmallDisk", "small_disk"]

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_PAGE_BYTES = 4096
# LOOP_SET_STATUS64 and LOOP_GET_STATUS64 of a loop_info64, and where its lo_sizelimit is: linux/loop.h.
_SET_STATUS, _GET_STATUS, _STATUS_BYTES, _LIMIT_OFFSET = 0x4C04, 0x4C05, 232, 32


class SmallDisk(NamedTuple):
    """Holds where a small disk is."""

    mount: Path
    """Where it is mounted; `run` in it is the checkpoint's folder, `scratch` that of offloaded bytes."""
    beside: Path
    """A folder on a disk that works, with links `kept` and `scratch` to those."""
    loop: str
    """The loop device, over a file that has no name any more."""

    def cut(self, num_bytes: int) -> None:
        """Takes all blocks from there on away from the device, at once, under the file system that is mounted.

        With the file behind it cut short first, a write in between would make it longer again.
        """
        status = bytearray(_STATUS_BYTES)
        with open(self.loop, "rb", buffering=0) as device:
            fcntl.ioctl(device, _GET_STATUS, status)
            struct.pack_into("Q", status, _LIMIT_OFFSET, num_bytes)
            fcntl.ioctl(device, _SET_STATUS, bytes(status))

    def files(self) -> list[Path]:
        """Returns the checkpoint's data, and the files without a name that a run has open in `scratch`."""
        scratch, data, found = str(self.mount / "scratch"), self.mount / "run" / "memwall.data", []
        for path in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):  # it was closed since
                found += [path] if os.readlink(path).startswith(scratch) else []
        return [*found, *([data] if data.exists() else [])]

    def blocks_of(self, path: Path) -> list[range]:
        """Returns the ranges of bytes of the device that a file has written to; not those that it has reserved."""
        shown = subprocess.run(["filefrag", "-b1", "-v", path], capture_output=True, text=True, check=True).stdout
        written = "\n".join(line for line in shown.splitlines() if "unwritten" not in line)
        found = re.findall(r"^\s*\d+:\s*\d+\.\.\s*\d+:\s*(\d+)\.\.\s*(\d+):", written, re.MULTILINE)
        return [range(int(first), int(last) + 1) for first, last in found]

    def rescue(self, target: Path) -> bool:
        """Copies what can be read of the checkpoint, from the device alone; returns whether all could be.

        What cannot be read is zeros in the copy.
        """
        target.mkdir(parents=True)
        is_whole = True
        for path in (self.mount / "run").iterdir():
            with path.open("rb", buffering=0) as file, (target / path.name).open("wb") as copy:
                length_bytes = os.fstat(file.fileno()).st_size
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                for offset in range(0, length_bytes, _PAGE_BYTES):
                    num_bytes = min(_PAGE_BYTES, length_bytes - offset)
                    try:
                        copy.write(os.pread(file.fileno(), num_bytes, offset))
                    except OSError:
                        is_whole = False
                        copy.write(bytes(num_bytes))
        return is_whole


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Makes and mounts a small disk, which is gone afterwards, also where this process is killed.

    The mount is in a namespace of this process alone, which ends with it, as does the image, whose name is taken away;
    the kernel takes the loop device apart with the mount.
    """
    _have_own_mounts()
    path, mount, beside = folder / "disk.img", folder / "disk", folder / "beside"
    shutil.rmtree(beside, ignore_errors=True)
    mount.mkdir(exist_ok=True)
    beside.mkdir()
    try:
        with path.open("wb") as image:
            image.truncate(num_bytes)
        subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "nodiscard", path], check=True)
        subprocess.run(["mount", "-o", "loop", path, mount], check=True)
    finally:
        path.unlink(missing_ok=True)
    try:
        shown = subprocess.run(["findmnt", "-no", "SOURCE", mount], capture_output=True, text=True, check=True)
        for name, link in (("run", "kept"), ("scratch", "scratch")):
            (mount / name).mkdir()
            (beside / link).symlink_to(mount / name)
        yield SmallDisk(mount, beside, shown.stdout.strip())
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@cache
def _have_own_mounts() -> None:
    """Leaves the mounts of the machine, once: those that follow are this process's, and end with it."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.unshare(_NEW_MOUNTS):
        raise OSError(ctypes.get_errno(), "no mounts of its own")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
