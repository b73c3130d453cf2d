"""Something that a session has open on disk for a while: what closes it, and what it has moved."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar


class _Counting(Protocol):
    @property
    def bytes_written(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...


T = TypeVar("T", bound=_Counting)


class OpenOnDisk(Generic[T]):
    """Holds nothing at first; `held` is what was opened, until it is closed."""

    def __init__(self) -> None:
        self.held: T | None = None
        self._close: Callable[[], None] = lambda: None
        self._written_bytes = self._read_bytes = 0  # by what is closed, less what was told

    def hold(self, opened: tuple[T, Callable[[], None]]) -> None:
        """Keeps what was opened, with what closes it."""
        self.held, self._close = opened

    def close(self) -> None:
        """Ends it, if there is one.

        Raises:
            StoreError: it could not bring back what it had on disk.
        """
        close, self._close = self._close, lambda: None
        try:
            close()
        finally:
            if self.held is not None:
                self._written_bytes += self.held.bytes_written
                self._read_bytes += self.held.bytes_read
            self.held = None

    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes written to disk and read from it since this was asked last, by what is closed as well."""
        held = self.held
        written_bytes, read_bytes = (0, 0) if held is None else (held.bytes_written, held.bytes_read)
        moved = self._written_bytes + written_bytes, self._read_bytes + read_bytes
        self._written_bytes, self._read_bytes = -written_bytes, -read_bytes
        return moved
