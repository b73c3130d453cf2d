"""A disk whose calls a test replaces."""

import errno
import os
import threading
from collections.abc import Callable

import pytest

from memwall.store.backend import SystemBackend

__all__ = ["Faulty", "Gate", "fill_disk"]


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the disk find at its sync that it has no room for what was written."""

    def sync(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", sync)


class Faulty(SystemBackend):
    """Runs `on_write` and `on_read` in place of the real calls, with the count of calls so far."""

    def __init__(
        self,
        on_write: Callable[[int, int, memoryview, int], int] | None = None,
        on_read: Callable[[int, int, memoryview, int], int] | None = None,
    ) -> None:
        self.on_write, self.on_read, self.num_writes, self.num_reads = on_write, on_read, 0, 0

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.num_writes += 1
        return self.on_write(self.num_writes, fd, data, offset) if self.on_write else os.pwrite(fd, data, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.num_reads += 1
        return self.on_read(self.num_reads, fd, buffer, offset) if self.on_read else os.preadv(fd, [buffer], offset)


class Gate:
    """A disk that writes nothing before it is opened, and asks `look` at each write."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.backend = Faulty(self._write)
        self.num_waiting = 0
        self.look: Callable[[], None] = lambda: None

    def _write(self, count: int, fd: int, data: memoryview, offset: int) -> int:
        self.num_waiting += 1
        self.event.wait(10)
        self.look()
        return os.pwrite(fd, data, offset)
