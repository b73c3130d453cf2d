"""The least time a step takes whose bytes must pass the disk: what the disk keeps up, and what hides behind what."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from raw_disk import RawDisk

__all__ = ["DiskSpeed", "bound_seconds", "sustained"]


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Of O_DIRECT over a whole file, once written before."""

    file_bytes: int
    read_bytes_per_second: float
    write_bytes_per_second: float


def sustained(directory: str, file_bytes: int) -> DiskSpeed:
    """What the disk keeps up over a file of this size; three passes over it, so about three times its time."""
    with closing(RawDisk(directory, file_bytes=file_bytes)) as disk:
        write, read = disk.seconds_per_byte()
    return DiskSpeed(file_bytes=file_bytes, read_bytes_per_second=1 / read, write_bytes_per_second=1 / write)


def bound_seconds(
    compute_seconds: Sequence[float],
    read_bytes: Sequence[float],
    written_bytes: Sequence[float],
    read_bytes_per_second: float,
    write_bytes_per_second: float,
) -> float:
    """The least a step can take where each phase's transfers hide behind its arithmetic, and no other phase's.

    Args:
        compute_seconds: of forward, backward and step, as the other arguments.
        read_bytes: what a phase reads, over a link that either reads or writes.
        written_bytes: what it writes.
        read_bytes_per_second: of the disk.
        write_bytes_per_second: of the disk.
    """
    return sum(
        max(compute, read / read_bytes_per_second + written / write_bytes_per_second)
        for compute, read, written in zip(compute_seconds, read_bytes, written_bytes, strict=True)
    )
