"""A disk whose calls a test replaces."""

import os
from collections.abc import Callable

from memwall.store.backend import SystemBackend

__all__ = ["Faulty"]


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
