"""Which engine moves the blocks of a disk: the system's own reads and writes, or io_uring where that won a race.

Nobody chooses: `machine.disk_race` measures, and what it finds holds for this process, on that disk. Whatever is
opened there afterwards for a `TransferPool` is moved by the winner. Until then, and everywhere else, it is the system's
calls.
"""

import os
from typing import Literal

from memwall.store.backend import IOBackend, SystemBackend
from memwall.store.uring import UringBackend

__all__ = ["EngineName", "adopt", "backend_of", "engine_of"]

EngineName = Literal["system calls", "io_uring"]

_adopted: dict[int, UringBackend] = {}
"""Of each disk on which io_uring was faster, by the number of its device."""


def adopt(directory: str | os.PathLike[str], engine: EngineName) -> None:
    """Have what is opened from now on, on the disk of `directory`, moved by that engine.

    Raises:
        OSError: there is no io_uring here, or no such directory.
    """
    device = os.stat(directory).st_dev
    if engine == "io_uring":
        _adopted[device] = UringBackend()
    else:
        _adopted.pop(device, None)


def backend_of(directory: str | os.PathLike[str]) -> IOBackend:
    """What moves blocks on the disk of `directory`. One that is not there is for whoever opens a file in it to name."""
    try:
        adopted = _adopted.get(os.stat(directory).st_dev)
    except OSError:
        adopted = None
    return SystemBackend() if adopted is None else adopted


def engine_of(directory: str | os.PathLike[str]) -> EngineName:
    """The name of that."""
    return "io_uring" if isinstance(backend_of(directory), UringBackend) else "system calls"
