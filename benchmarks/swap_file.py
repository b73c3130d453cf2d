"""Swap of the kernel on a file of its own, for as long as a benchmark needs it; takes root.

Sources: mkswap(8), swapon(8). The file has all its blocks before it becomes swap, as swap has no holes.
"""

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SwapUnavailable", "swap_file"]


class SwapUnavailable(Exception):
    """The kernel takes no swap file here; the message says why."""


@contextmanager
def swap_file(directory: str, num_bytes: int) -> Iterator[Path]:
    """Adds so much swap to the machine; it is off and its file gone when the context ends.

    Raises:
        SwapUnavailable: no root, no room on the disk, no such commands, or a file system that holds no swap.
    """
    if os.geteuid() != 0:
        raise SwapUnavailable("only root adds swap")
    free_bytes = shutil.disk_usage(directory).free
    if num_bytes > free_bytes:
        raise SwapUnavailable(f"{directory} has {free_bytes} bytes free, {num_bytes} are needed")
    path = Path(directory) / f"memwall-swap-{uuid.uuid4().hex[:12]}"
    is_on = False
    try:
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        except OSError as error:
            raise SwapUnavailable(f"cannot allocate {num_bytes} bytes in {directory}: {error.strerror}") from error
        finally:
            os.close(file)
        _do("mkswap", path)
        _do("swapon", path)
        is_on = True
        yield path
    finally:
        if is_on:
            _do("swapoff", path)
        path.unlink(missing_ok=True)


def _do(command: str, path: Path) -> None:
    try:
        done = subprocess.run([command, str(path)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise SwapUnavailable(f"there is no command {command}") from None
    if done.returncode:
        raise SwapUnavailable(done.stderr.strip() or f"{command} ended with status {done.returncode}")
