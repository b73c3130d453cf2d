"""A disk as `memwall doctor` sees it: its speed the way the store uses it, and which engine would be faster there."""

import shutil
from pathlib import Path

from msgspec import Struct

from memwall.errors import StoreError
from memwall.machine.disk_location import default_directory
from memwall.machine.disk_probe import DiskSpeed, probe_disk
from memwall.machine.disk_race import race_engines, race_seconds
from memwall.store.engines import EngineName

__all__ = ["Disk", "Engines", "measure_disk"]

# What a person waits for an answer about a disk; a start-up asks faster disks only.
_RACE_SECONDS = 2.0


class Engines(Struct, frozen=True, kw_only=True):
    """The two that can move blocks, on one disk in turns; times are quartiles."""

    turn_bytes: int
    """Written, and read back, in one turn."""
    system_seconds: tuple[float, float, float]
    uring_seconds: tuple[float, float, float]
    faster: EngineName
    """io_uring only where the two do not overlap."""


class Disk(Struct, frozen=True, kw_only=True):
    """A folder for offloaded bytes, with its measured speed."""

    directory: str
    free_bytes: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    engines: Engines | None = None
    """None where there is nothing to compare."""
    engine_problem: str = ""
    """Why there is not."""


def measure_disk(directory: Path | None) -> tuple[Disk | None, str]:
    """A directory's disk; or, of the one that is used when the user names none, why it is unsuitable.

    Raises:
        StoreError: the named directory cannot hold offloaded bytes.
    """
    try:
        folder = str(directory or default_directory())
        speed = probe_disk(folder)
        engines, engine_problem = _race_engines(folder, speed)
    except StoreError as error:
        if directory is not None:
            raise
        return None, str(error)
    disk = Disk(
        directory=folder,
        free_bytes=shutil.disk_usage(folder).free,
        write_bytes_per_second=speed.write_bytes_per_second,
        read_bytes_per_second=speed.read_bytes_per_second,
        engines=engines,
        engine_problem=engine_problem,
    )
    return disk, ""


def _race_engines(folder: str, speed: DiskSpeed) -> tuple[Engines | None, str]:
    """io_uring beside the system's calls, or why it is not."""
    if race_seconds(speed) > _RACE_SECONDS:
        return None, "not compared with io_uring, since threads wait for a disk of this speed, whatever the engine"
    try:
        race = race_engines(folder)
    except OSError as error:
        return None, f"io_uring cannot be had ({error.strerror or error})"
    engines = Engines(
        turn_bytes=race.turn_bytes,
        system_seconds=race.system_quartiles_seconds,
        uring_seconds=race.uring_quartiles_seconds,
        faster=race.faster,
    )
    return engines, ""
