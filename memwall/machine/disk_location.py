"""Checks before a run starts whether a directory is fit to hold offloaded bytes, and says what to do if not."""

import errno
import logging
import os
import tempfile

from memwall.errors import OffloadIOError, StoreError
from memwall.mounts import mount_of
from memwall.units import format_bytes

_RAM_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
_NETWORK_FILESYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "gpfs", "9p", "fuse.sshfs", "beegfs"}
_logger = logging.getLogger(__name__)


def filesystem_of(path: str | os.PathLike[str]) -> str | None:
    """Returns the type of the filesystem that holds a file or folder ("ext4"); None where the system does not tell."""
    found = mount_of(path)
    return None if found is None else found[1][0]


def check_directory(path: str | os.PathLike[str], needed_bytes: int = 0) -> None:
    """Checks that `path` can hold `needed_bytes` of offloaded bytes.

    Raises:
        OffloadIOError: its disk fails or is full, or the kernel has stopped writes to it.
        StoreError: it is missing, no directory, not writable, in RAM, or too small; the message says what to do.
    """
    shown = os.fspath(path)
    try:
        os.stat(shown)
    except OSError as error:
        _raise_if_failing(shown, error)
        raise StoreError(
            f"--disk {shown}: this directory does not exist; create it (mkdir -p {shown}) or give another one"
        ) from error
    if not os.path.isdir(shown):
        raise StoreError(f"--disk {shown}: this is a file; give a directory on a disk with free space")
    filesystem = filesystem_of(shown)
    if filesystem in _RAM_FILESYSTEMS:
        raise StoreError(
            f"--disk {shown}: this is a RAM disk ({filesystem}), so moving bytes there would free no memory; "
            "give a directory on a real disk"
        )
    if filesystem in _NETWORK_FILESYSTEMS:
        _logger.warning(
            "--disk %s is on a network filesystem (%s), which is slow; give a folder on a disk of this machine",
            shown,
            filesystem,
        )
    _check_writable(shown)
    found = os.statvfs(shown)
    free_bytes = found.f_bavail * found.f_frsize
    if free_bytes < needed_bytes:
        raise StoreError(
            f"--disk {shown}: {format_bytes(needed_bytes, rounding='up')} are needed there, "
            f"{format_bytes(free_bytes, rounding='down')} are free; "
            f"free {format_bytes(needed_bytes - free_bytes, rounding='up')} or give a directory on a larger disk"
        )


def default_directory() -> str:
    """Returns the directory to use when the user named none: the system's temporary one, where that is on a disk.

    Raises:
        StoreError: it is unsuitable; the message asks for `--disk DIR`.
    """
    try:
        directory = tempfile.gettempdir()
        check_directory(directory)
    except (OSError, StoreError) as error:
        reason = str(error).removeprefix("--disk ")
        raise StoreError(
            f"offloading needs a directory on a disk, and the default one is unsuitable ({reason}); "
            "name one with --disk DIR"
        ) from error
    return directory


def _check_writable(shown: str) -> None:
    # Creating a file is the only answer that holds for root, for access lists and for network filesystems alike.
    try:
        with tempfile.TemporaryFile(dir=shown):
            pass
    except OSError as error:
        _raise_if_failing(shown, error)
        if error.errno == errno.EROFS:
            problem, advice = "its filesystem is mounted read-only", "remount it or give another directory"
        else:
            problem = f"no file can be created there ({os.strerror(error.errno or 0)})"
            advice = "change its permissions or give a directory that you may write to"
        raise StoreError(f"--disk {shown}: {problem}; {advice}") from error


def _raise_if_failing(shown: str, error: OSError) -> None:
    from memwall.store.backend import refused  # which a script that fits anyway does without

    found = refused(f"--disk {shown}", error, path=shown, advice="")
    if isinstance(found, OffloadIOError):
        raise found from error
