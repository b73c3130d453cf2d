"""Opens the scratch file that a part of a run moves bytes to, with its threads."""

from memwall.machine.disk_location import check_directory, default_directory
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

__all__ = ["open_scratch_pool"]


def open_scratch_pool(disk: str | None, capacity_bytes: int | None) -> TransferPool:
    """Returns threads over a new scratch file.

    Args:
        disk: directory; None for the default one.
        capacity_bytes: the most to take there; None leaves only the disk's own limit.

    Raises:
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    directory = disk if disk is not None else default_directory()
    check_directory(directory)
    return TransferPool(ScratchFile(directory, capacity_bytes=capacity_bytes))
