"""A disk as `memwall doctor` sees it: its speed the way the store uses it."""

import shutil
from pathlib import Path

from msgspec import Struct

from memwall.errors import StoreError
from memwall.machine.disk_location import default_directory
from memwall.machine.disk_probe import probe_disk

__all__ = ["Disk", "measure_disk"]


class Disk(Struct, frozen=True, kw_only=True):
    """A folder for offloaded bytes, with its measured speed."""

    directory: str
    free_bytes: int
    write_bytes_per_second: float
    read_bytes_per_second: float


def measure_disk(directory: Path | None) -> tuple[Disk | None, str]:
    """A directory's disk; or, of the one that is used when the user names none, why it is unsuitable.

    Raises:
        StoreError: the named directory cannot hold offloaded bytes.
    """
    try:
        folder = str(directory or default_directory())
        speed = probe_disk(folder)
    except StoreError as error:
        if directory is not None:
            raise
        return None, str(error)
    disk = Disk(
        directory=folder,
        free_bytes=shutil.disk_usage(folder).free,
        write_bytes_per_second=speed.write_bytes_per_second,
        read_bytes_per_second=speed.read_bytes_per_second,
    )
    return disk, ""
