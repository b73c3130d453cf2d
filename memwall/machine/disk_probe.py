"""Measures in under a second how fast a disk is for the way the store uses it, through the store itself."""

import mmap
import os
import shutil
import time

import msgspec

from memwall.machine.disk_location import check_directory
from memwall.machine.limits import num_local_ranks
from memwall.machine.tiers import Tier
from memwall.store.backend import SystemBackend
from memwall.store.scratch import ScratchFile, Slot
from memwall.store.transfer import DEFAULT_BLOCK_BYTES, TransferPool
from memwall.store.workers import Transfer

_PASS_SECONDS = 0.25
_QUEUE_DEPTH = 4
STANDS_SECONDS = 600.0
"""So long a measurement holds for the sessions that follow: a disk may get slower as others use it."""
_measured: dict[tuple[int, int], tuple[float, Tier]] = {}
"""By device and bytes to move, when it was measured, and what was found."""


def known_disk(directory: str | os.PathLike[str], num_bytes: int) -> Tier:
    """Returns what `probe_disk` finds, or has found of the same device minutes ago, with the space that is free now.

    Raises:
        StoreError: the directory is unsuitable, full, or fails.
    """
    key = os.stat(directory).st_dev if os.path.isdir(directory) else -1, num_bytes
    begin, found = _measured.get(key, (0.0, None))
    if found is None or time.monotonic() - begin >= STANDS_SECONDS:
        begin, found = time.monotonic(), probe_disk(directory, num_bytes)
        _measured[key] = begin, found
    else:
        check_directory(directory, needed_bytes=num_bytes)
    return msgspec.structs.replace(found, directory=os.fspath(directory), **_space(directory))


def probe_disk(
    directory: str | os.PathLike[str], num_bytes: int = 256 << 20, *, backend: SystemBackend | None = None
) -> Tier:
    """Measures the disk of a directory, as what the store reaches when nothing else uses disk and processor.

    Writes and reads up to `num_bytes` for at most about a second in all, and leaves nothing behind. The extents are
    written once before the timing, as in a run: first writes into fresh extents are slower.

    Raises:
        StoreError: the directory is unsuitable, full, or fails.
    """
    check_directory(directory, needed_bytes=num_bytes)
    block_bytes = min(DEFAULT_BLOCK_BYTES, num_bytes)
    with TransferPool(ScratchFile(directory, backend=backend), block_bytes=block_bytes) as pool:
        slots = [pool.scratch.allocate(block_bytes) for _ in range(max(1, num_bytes // block_bytes))]
        views = _random_buffers(block_bytes)
        num_warmed, _ = _timed_pass(pool, slots, views, is_read=False)
        num_written, write_seconds = _timed_pass(pool, slots[:num_warmed], views, is_read=False)
        num_read, read_seconds = _timed_pass(pool, slots[:num_written], views, is_read=True)
    return Tier(
        name="disk",
        directory=os.fspath(directory),
        write_bytes_per_second=num_written * block_bytes / write_seconds,
        read_bytes_per_second=num_read * block_bytes / read_seconds,
        **_space(directory),
    )


def _space(directory: str | os.PathLike[str]) -> dict[str, int]:
    usage = shutil.disk_usage(directory)
    return {"free_bytes": usage.free // num_local_ranks(), "total_bytes": usage.total}  # each rank plans to use all


def _random_buffers(block_bytes: int) -> list[memoryview]:
    """Returns as many blocks as are under way at once. One that compresses must not look faster than it is."""
    buffers = [mmap.mmap(-1, block_bytes) for _ in range(_QUEUE_DEPTH)]
    for buffer in buffers:
        buffer.write(os.urandom(block_bytes))
    return [memoryview(buffer) for buffer in buffers]


def _timed_pass(pool: TransferPool, slots: list[Slot], views: list[memoryview], *, is_read: bool) -> tuple[int, float]:
    """Moves one block per slot until the time is up; returns the number moved and the seconds taken."""
    move = pool.read if is_read else pool.write
    under_way: list[Transfer] = []
    started = time.perf_counter()
    for count, slot in enumerate(slots):
        if count >= len(views):
            under_way[count - len(views)].wait()
            if time.perf_counter() - started > _PASS_SECONDS:
                break
        under_way.append(move(slot, views[count % len(views)]))
    for transfer in under_way[-len(views) :]:
        transfer.wait()
    return len(under_way), time.perf_counter() - started
