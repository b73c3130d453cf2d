"""Writes and reads the files that memwall has for itself: each is written whole and read strictly, by its version.

Plans, run reports and traces are `FileKind`s, so that a foreign, damaged, older or newer file is refused in the same
words everywhere, with the reason and the way out.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from memwall.errors import MemwallError, UsageError
from memwall.units import format_bytes

NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Are raised by msgspec for text that is no JSON, bytes that are no text, and brackets without end."""

_MOST_DIGITS = 9
_LARGEST_BYTES = 256 << 20
"""A plan for thousands of blocks has a few MiB; a file that is larger than this was never written by memwall."""

R = TypeVar("R", bound=Struct)


class FileKind(Struct, frozen=True, kw_only=True):
    """Says what a kind of file is called, which version of it this memwall reads, and what to do about others."""

    noun: str
    """Names the file in messages, as in "cannot read the plan x.json"."""
    schema: str
    """Precedes the version where the file says what it is, e.g. "memwall.plan"."""
    version: int
    error: type[MemwallError]
    """Is raised for a file that cannot be read."""
    way_out: str
    """Says how to get a file that can be read."""

    def read_bytes(self, path: Path) -> bytes:
        """Returns what the file holds.

        Raises:
            MemwallError: it cannot be read, or is larger than any that memwall writes.
        """
        try:
            return path.read_bytes()
        except OSError as error:
            raise self.error(f"cannot read the {self.noun} {path}: {error.strerror or error}") from error

    def require_version(self, path: Path, found: int) -> None:
        """Refuses a file of another version.

        Raises:
            MemwallError: this memwall does not read that version.
        """
        if found > self.version:
            raise self.error(
                f"{path} is a {self.noun} of version {found}, this memwall reads version {self.version}; upgrade "
                f"torch-memwall, or {self.way_out}"
            )
        if found < self.version:
            raise self.error(
                f"{path} is a {self.noun} of version {found}, written by an earlier memwall; this one reads version "
                f"{self.version}: {self.way_out}"
            )

    def read_json(self, path: Path, convert: Callable[[dict[str, Any]], R]) -> R:
        """Returns the record that a JSON file holds.

        Args:
            path: the file; its object names schema and version under "schema".
            convert: makes the record, or raises msgspec.ValidationError with the path inside the file.

        Raises:
            MemwallError: no such file, too large, cut short, of another kind or version, or with an unknown or
                mistyped field; the message names the file and the path inside it.
        """
        try:
            size_bytes = path.stat().st_size
        except OSError:
            size_bytes = 0  # reading it says why
        if size_bytes > _LARGEST_BYTES:
            raise self.error(
                f"{path} is no {self.noun}: it holds {format_bytes(size_bytes)}, more than any that memwall writes; "
                f"{self.way_out}"
            )
        try:
            found: Any = msgspec.json.decode(self.read_bytes(path))
        except NO_JSON as error:
            raise self.error(f"{path} is cut short or no JSON ({error}); {self.way_out}") from error
        schema = found.get("schema") if isinstance(found, dict) else None
        prefix, _, version = str(schema).rpartition("/")
        if prefix != self.schema or not version.isdecimal() or len(version) > _MOST_DIGITS:
            raise self.error(
                f"{path} is not a memwall {self.noun}: at $.schema expected '{self.schema}/{self.version}', found "
                f"{schema!r}"
            )
        self.require_version(path, int(version))
        try:
            return convert(found)
        except msgspec.ValidationError as error:
            raise self.error(f"{path} is not a valid {self.noun}: {error}") from error


def json_bytes(value: object) -> bytes:
    """Returns a value as JSON for people and for diff: sorted keys, indented, equal for equal values."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=2) + b"\n"


@contextmanager
def whole_file(
    path: Path, *, noun: str = "report", error: type[MemwallError] = UsageError, way_out: str = ""
) -> Iterator[BinaryIO]:
    """Gives a file to write to, which takes the name `path` when the block ends without an error.

    Until then the file that had the name stays as it was. What has the name survives a loss of power, whole.

    Args:
        noun: names the file in the message, as in "cannot write the plan to x.json".
        error: is raised when it cannot be written.
        way_out: ends the message.

    Raises:
        MemwallError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")  # ranks may write one file at a time
    try:
        partial.unlink(missing_ok=True)  # of a run that was killed; what is opened is new, and no link
        with partial.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except OSError as failure:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        what = f"cannot write the {noun} to {path}: {failure.strerror or failure}"
        raise error(f"{what}; {way_out}" if way_out else what) from failure
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Returns once the names of the files in a directory survive a loss of power, where its filesystem can say so.

    Raises:
        OSError: the disk fails.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:  # a folder for writing alone cannot be asked; its files are there
        return
    try:
        os.fsync(fd)
    except OSError as failure:
        if failure.errno not in {errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF, errno.ENOSYS}:
            raise
    finally:
        os.close(fd)
