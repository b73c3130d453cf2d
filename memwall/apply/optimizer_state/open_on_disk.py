"""Something that a session has open on disk for a while: what closes it, and what it has moved."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

__all__ = ["OpenOnDisk"]


class _Counting(Protocol):
    @property
    def bytes_written(self) -> int: ...

    @property
    def bytes_read(self) -> int: ...


T = TypeVar("T", bound=_Counting)


class OpenOnDisk(Generic[T]):
    """Nothing at first; `held` is what was opened, until it is closed."""

    def __init__(self) -> None:
        self.held: T | None = None
        self._close: Callable[[], None] | None = None
        self._counted = (0, 0)

    def hold(self, opened: tuple[T, Callable[[], None]]) -> None:
        """Keeps what was opened, with what closes it."""
        self.held, self._close = opened

    def close(self) -> None:
        """Ends it, if there is one.

        Raises:
            StoreError: it could not bring back what it had on disk.
        """
        close, self._close = self._close, None
        try:
            if close is not None:
                close()
        finally:
            counts = self._counts()
            self._counted = (self._counted[0] - counts[0], self._counted[1] - counts[1])
            self.held = None

    def moved_bytes(self) -> tuple[int, int]:
        """Bytes written to disk and read from it since this was asked last, by what is closed already as well."""
        counts = self._counts()
        moved = counts[0] - self._counted[0], counts[1] - self._counted[1]
        self._counted = counts
        return moved

    def _counts(self) -> tuple[int, int]:
        return (0, 0) if self.held is None else (self.held.bytes_written, self.held.bytes_read)
