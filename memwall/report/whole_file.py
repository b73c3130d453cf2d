"""Writing a report so that a file half written never takes the place of a whole one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from memwall.errors import UsageError

__all__ = ["whole_file"]


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the name `path` when the block ends without an error.

    Raises:
        UsageError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(path.name + ".part")
    try:
        with partial.open("wb") as file:
            yield file
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UsageError(f"cannot write the report to {path}: {error.strerror or error}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
