"""A disk in memory that remembers in which order it was written, and what is left of it after a loss of power.

What was synced is there. Of every write since then any sectors may be there, and others not: the disk orders nothing.
"""

import random
import threading
from dataclasses import dataclass, field

from memwall.store.backend import OpenScratch, SystemBackend

__all__ = ["Operation", "SimulatedDisk"]

SECTOR_BYTES = 512


@dataclass(frozen=True)
class Operation:
    """One call that changes a file: a write, a new length (`data` empty), or a sync (`offset` negative)."""

    path: str
    offset: int
    data: bytes = b""

    @property
    def is_sync(self) -> bool:
        return self.offset < 0

    def apply_to(self, content: bytearray) -> None:
        end = self.offset + len(self.data)
        if end > len(content):
            content.extend(bytes(end - len(content)))
        content[self.offset : end] = self.data

    def torn(self, draw: random.Random) -> "list[Operation]":
        """The sectors of a write that made it."""
        if not self.data:
            return [self] if draw.random() < 0.5 else []
        keep = draw.choice((0.0, 0.5, 0.9, 1.0))
        pieces = range(0, len(self.data), SECTOR_BYTES)
        return [
            Operation(self.path, self.offset + start, self.data[start : start + SECTOR_BYTES])
            for start in pieces
            if draw.random() < keep
        ]


@dataclass
class SimulatedDisk(SystemBackend):
    """Answers in the system's place.

    Attributes:
        ignores_sync_of: the end of a path for which this disk says that it is synced, and is not.
    """

    log: list[Operation] = field(default_factory=list)
    ignores_sync_of: str = "nothing"

    def has_name(self, fd: int, path: str) -> bool:
        return True

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[int, str] = {}
        self._files: dict[str, bytearray] = {}
        for operation in self.log:
            self._apply(operation)

    def _apply(self, operation: Operation) -> None:
        content = self._files.setdefault(operation.path, bytearray())
        if not operation.is_sync:
            operation.apply_to(content)

    def _record(self, operation: Operation) -> None:
        with self._lock:
            self.log.append(operation)
            self._apply(operation)

    def killed_at(self, position: int) -> "SimulatedDisk":
        """The disk when the process was killed: everything is there, what was not synced only for now."""
        return SimulatedDisk(self.log[:position], self.ignores_sync_of)

    def without_power_at(self, position: int, seed: int) -> "SimulatedDisk":
        """The disk after a loss of power."""
        draw = random.Random(seed)
        begun = self.log[:position]
        last_sync = {operation.path: number for number, operation in enumerate(begun) if operation.is_sync}
        left: list[Operation] = []
        for number, operation in enumerate(begun):
            if not operation.is_sync:
                is_safe = number < last_sync.get(operation.path, -1)
                left += [operation] if is_safe else operation.torn(draw)
        syncs = [Operation(path, -1) for path in {operation.path for operation in left}]
        return SimulatedDisk(left + syncs, self.ignores_sync_of)

    # -- SystemBackend -------------------------------------------------------------------------------------------------

    def open_scratch(self, directory: str) -> OpenScratch:
        raise NotImplementedError("a checkpoint has no scratch file")

    def open_file(self, path: str, *, is_read_only: bool = False) -> OpenScratch:
        fd = len(self._paths)
        self._paths[fd] = path
        self._files.setdefault(path, bytearray())
        return OpenScratch(fd=fd, is_direct=True)

    def size_bytes(self, fd: int) -> int:
        return len(self._files[self._paths[fd]])

    def sync(self, fd: int) -> None:
        if not self._paths[fd].endswith(self.ignores_sync_of):
            self._record(Operation(self._paths[fd], -1))

    def sync_directory(self, path: str) -> None:
        pass

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        self._record(Operation(self._paths[fd], offset + num_bytes))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._record(Operation(self._paths[fd], offset, bytes(data)))
        return len(data)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        found = self._files[self._paths[fd]][offset : offset + len(buffer)]
        buffer[: len(found)] = found
        return len(found)

    def forget(self, fd: int, offset: int, num_bytes: int) -> None:
        pass

    def free_bytes(self, directory: str) -> int:
        return 1 << 40

    def close(self, fd: int) -> None:
        pass
