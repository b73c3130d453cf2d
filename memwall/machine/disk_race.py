"""The two engines of the store against each other: the same file, block size, threads and window, in turns.

What an engine can save is the processor's time for a call. On the disks measured so far that is a few per cent of the
time that a block of 1 to 4 MiB takes, beside which a second thread has the next block under way, and io_uring was not
faster (`benchmarks/io_engines.py`). It may be on much faster ones; so a run asks, and only there: `adopt_faster`.
"""

import os
import statistics
from dataclasses import dataclass

from memwall.machine.disk_location import check_directory
from memwall.machine.disk_probe import DiskSpeed, probe_disk, random_buffers, timed_pass
from memwall.store.backend import IOBackend, SystemBackend
from memwall.store.engines import EngineName, adopt
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import DEFAULT_BLOCK_BYTES, TransferPool
from memwall.store.uring import UringBackend

__all__ = ["EngineRace", "adopt_faster", "probe_faster", "race_engines", "race_seconds"]

_NUM_ROUNDS = 6
_BLOCKS_A_TURN = 8
# What start-up may spend on the question. All turns together move 400 MiB, so a disk below 4 GB/s is not asked about:
# there, whatever the engine, threads wait for the disk.
_MAX_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class EngineRace:
    """What each engine took to write some blocks and read them back, round by round."""

    turn_bytes: int
    """Written, and read, in one turn."""
    system_seconds: tuple[float, ...]
    uring_seconds: tuple[float, ...]

    @property
    def faster(self) -> EngineName:
        """The engine to use: io_uring only if three quarters of its turns beat three quarters of the others.

        Two arms of one engine differ less than that, or are taken for different about once in a hundred races; nothing
        is lost then, as they are equally fast.
        """
        return "io_uring" if _quartiles(self.uring_seconds)[2] < _quartiles(self.system_seconds)[0] else "system calls"

    @property
    def system_quartiles_seconds(self) -> tuple[float, float, float]:
        """Of the turns through the system's calls."""
        return _quartiles(self.system_seconds)

    @property
    def uring_quartiles_seconds(self) -> tuple[float, float, float]:
        """Of the turns through io_uring."""
        return _quartiles(self.uring_seconds)


def race_engines(
    directory: str | os.PathLike[str], *, system: IOBackend | None = None, uring: IOBackend | None = None
) -> EngineRace:
    """Have both engines move blocks of one file in `directory`, which is gone afterwards.

    Args:
        directory: on the disk in question.
        system: a test's substitute for the system's calls.
        uring: a test's substitute for io_uring.

    Raises:
        OSError: there is no io_uring here.
        StoreError: the directory is unsuitable, full, or fails.
    """
    system = SystemBackend() if system is None else system
    uring = UringBackend() if uring is None else uring
    num_bytes = _BLOCKS_A_TURN * DEFAULT_BLOCK_BYTES
    check_directory(directory, needed_bytes=num_bytes)
    seconds: dict[int, list[float]] = {id(system): [], id(uring): []}
    either = _Either(system)
    with TransferPool(ScratchFile(directory, backend=either)) as pool:
        slots = [pool.scratch.allocate(pool.block_bytes) for _ in range(_BLOCKS_A_TURN)]
        views = random_buffers(pool.block_bytes)
        for either.current in (system, uring):  # first writes into fresh extents are slower; threads make their rings
            num_warmed, _ = timed_pass(pool, slots, views, is_read=False)
        for index in range(_NUM_ROUNDS):
            for either.current in (system, uring) if index % 2 else (uring, system):
                num_written, write_seconds = timed_pass(pool, slots[:num_warmed], views, is_read=False)
                num_read, read_seconds = timed_pass(pool, slots[:num_warmed], views, is_read=True)
                per_block_seconds = write_seconds / num_written + read_seconds / num_read
                seconds[id(either.current)].append(_BLOCKS_A_TURN * per_block_seconds)
    return EngineRace(
        turn_bytes=num_bytes, system_seconds=tuple(seconds[id(system)]), uring_seconds=tuple(seconds[id(uring)])
    )


def race_seconds(speed: DiskSpeed) -> float:
    """How long a race takes on a disk of that speed."""
    per_byte = 1 / speed.write_bytes_per_second + 1 / speed.read_bytes_per_second
    return per_byte * 2 * _NUM_ROUNDS * _BLOCKS_A_TURN * DEFAULT_BLOCK_BYTES


def adopt_faster(directory: str | os.PathLike[str], speed: DiskSpeed) -> EngineName:
    """Have the disk of `directory` served by whichever engine is faster there, as far as a start-up has time to ask.

    Args:
        directory: on the disk in question.
        speed: of the disk, which decides whether there is time.

    Raises:
        StoreError: see `race_engines`.
    """
    if race_seconds(speed) > _MAX_SECONDS:
        return speed.engine
    try:
        uring = UringBackend()
    except OSError:  # refused, as containers do, or not built
        return speed.engine
    engine = race_engines(directory, uring=uring).faster
    adopt(directory, engine)
    return engine


def probe_faster(directory: str | os.PathLike[str], num_bytes: int) -> DiskSpeed:
    """The speed of a disk through the engine that serves it from now on; see `probe_disk` and `adopt_faster`."""
    speed = probe_disk(directory, num_bytes)
    return speed if adopt_faster(directory, speed) == speed.engine else probe_disk(directory, num_bytes)


class _Either(SystemBackend):
    """One open file, moved by the engine that is `current`."""

    def __init__(self, current: IOBackend) -> None:
        self.current = current

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        return self.current.pwrite(fd, data, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self.current.pread(fd, buffer, offset)


def _quartiles(seconds: tuple[float, ...]) -> tuple[float, float, float]:
    first, median, last = statistics.quantiles(seconds, n=4)
    return first, median, last
