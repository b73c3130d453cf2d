"""The one door to the disk: every read, write and reservation of offloaded bytes goes through a `SystemBackend`.

Faults are tested by putting a subclass in its place. Nothing here trusts a result: the two loops at the end move every
byte or raise `OffloadIOError`.
"""

import errno
import fcntl
import logging
import mmap
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from memwall.errors import OffloadIOError, StoreError
from memwall.mounts import is_made_read_only
from memwall.store.own_file import open_own
from memwall.units import format_bytes

# O_DIRECT wants address, offset and length in units of the device's logical block: 512 or 4096 on today's disks.
ALIGNMENT_BYTES = 4096
_ZERO_FILL_BYTES = 1 << 20
_CANNOT_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_logger = logging.getLogger(__name__)


def round_up(num_bytes: int, unit_bytes: int = ALIGNMENT_BYTES) -> int:
    """Returns the smallest multiple of `unit_bytes` that holds `num_bytes`."""
    return -(-num_bytes // unit_bytes) * unit_bytes


@dataclass(frozen=True, slots=True)
class OpenScratch:
    """Holds an open file: one without a name, or one that outlives the process."""

    fd: int
    is_direct: bool
    """Says whether reads and writes bypass the page cache (O_DIRECT)."""


class SystemBackend:
    """Reaches files of this machine by O_TMPFILE, O_DIRECT and posix_fallocate, with a logged fallback for each.

    Methods raise `OSError`; the callers give it words.
    """

    def open_scratch(self, directory: str) -> OpenScratch:
        """Opens an empty file in `directory` that vanishes with the process, however that ends."""
        fd = _open_unnamed(directory)
        try:
            is_direct = _switch_to_direct(fd, os.pwrite)
            os.ftruncate(fd, 0)
        except OSError:
            os.close(fd)
            raise
        if not is_direct:
            _logger.warning(
                "%s refuses O_DIRECT: offloaded bytes pass through the page cache, which is slower; give a "
                "folder on ext4, xfs or btrfs",
                directory,
            )
        return OpenScratch(fd=fd, is_direct=is_direct)

    def open_file(self, path: str, *, is_read_only: bool = False) -> OpenScratch:
        """Opens a file that outlives the process; one that is to be written is created empty where there is none.

        Raises:
            StoreError: the name is a link's, or a file's that is not this user's own.
        """
        fd = open_own(path, is_read_only=is_read_only)
        try:
            is_direct = _switch_to_direct(fd, _read_if_it_can_be)
        except OSError:
            os.close(fd)
            raise
        return OpenScratch(fd=fd, is_direct=is_direct)

    def size_bytes(self, fd: int) -> int:
        """Returns the length of the file."""
        return os.fstat(fd).st_size

    def has_name(self, fd: int, path: str) -> bool:
        """Returns whether an open file is still the one that a path leads to."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(path))
        except FileNotFoundError:
            return False

    def sync(self, fd: int) -> None:
        """Returns once everything written to the file, and its length, survives a loss of power."""
        os.fdatasync(fd)

    def sync_directory(self, path: str) -> None:
        """Returns once the names of the files in a directory survive a loss of power."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def reserve(self, fd: int, offset: int, num_bytes: int) -> None:
        """Makes [offset, offset + num_bytes) at the end of the file really exist on disk, or leaves no trace.

        Where the filesystem cannot reserve, zeros are written: the file is never sparse.
        """
        try:
            try:
                os.posix_fallocate(fd, offset, num_bytes)
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
                self._write_zeros(fd, offset, num_bytes)
        except OSError:
            os.ftruncate(fd, offset)  # what was reserved of a failed request would be lost until the file is closed
            raise

    def _write_zeros(self, fd: int, offset: int, num_bytes: int) -> None:
        with mmap.mmap(-1, _ZERO_FILL_BYTES) as zeros, memoryview(zeros) as view:
            end = offset + num_bytes
            while offset < end:
                with view[: min(_ZERO_FILL_BYTES, end - offset)] as piece:
                    count = self.pwrite(fd, piece, offset)
                if count <= 0:
                    raise OSError(errno.EIO, "the write made no progress")
                offset += count

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Writes some of `data` and returns the number of bytes written."""
        return os.pwritev(fd, [data], offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fills some of `buffer` and returns the number of bytes read, 0 at the end of the file."""
        return os.preadv(fd, [buffer], offset)

    def forget(self, fd: int, offset: int, num_bytes: int) -> None:
        """Lets the page cache drop an extent that passed through it."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def free_bytes(self, directory: str) -> int:
        """Returns the bytes that an ordinary user can still write in `directory`."""
        found = os.statvfs(directory)
        return found.f_bavail * found.f_frsize

    def close(self, fd: int) -> None:
        """Closes the file; the space of one without a name returns to the disk."""
        os.close(fd)


def _open_unnamed(directory: str) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        # EISDIR: a kernel that does not know O_TMPFILE; ENOENT: a filesystem (overlay) that reports it so.
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL}:
            raise
    fd, path = tempfile.mkstemp(prefix=".memwall-", dir=directory)
    os.unlink(path)
    return fd


def _switch_to_direct(fd: int, attempt: Callable[[int, mmap.mmap, int], int]) -> bool:
    """Sets O_DIRECT if the filesystem takes it, which some show at a real transfer only, and returns whether it does.

    Args:
        attempt: reads or writes a page of the file.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
            attempt(fd, page, 0)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True


def _read_if_it_can_be(fd: int, page: mmap.mmap, start: int) -> int:
    """Reads a page; one that the disk has lost keeps nobody from what is elsewhere in the file."""
    try:
        return os.preadv(fd, [page], start)
    except OSError as error:
        if error.errno not in _DISK_FAILS:
            raise
        return 0


def write_fully(
    backend: SystemBackend, fd: int, data: memoryview, offset: int, *, path: str, label: str, is_kept: bool = False
) -> None:
    """Writes all of `data` at `offset`.

    Args:
        path: of the file, or of the directory that a file without a name is in.
        label: names the bytes in an error.
        is_kept: whether the file is one of a checkpoint.

    Raises:
        OffloadIOError: the system refused, or a write made no progress.
    """
    _move_fully(backend.pwrite, "writing", fd, data, offset, path, label, is_kept)


def read_fully(
    backend: SystemBackend, fd: int, buffer: memoryview, offset: int, *, path: str, label: str, is_kept: bool = False
) -> None:
    """Fills all of `buffer` from `offset`; the arguments are those of `write_fully`.

    Raises:
        OffloadIOError: the system refused, or the file ended early.
    """
    _move_fully(backend.pread, "reading", fd, buffer, offset, path, label, is_kept)


def _move_fully(
    move: Callable[[int, memoryview, int], int],
    verb: str,
    fd: int,
    view: memoryview,
    offset: int,
    path: str,
    label: str,
    is_kept: bool,
) -> None:
    done, total = 0, len(view)
    while done < total:
        try:
            count = move(fd, view[done:], offset + done)
        except OSError as error:
            raise _failure(verb, path, label, offset, total, done, error.errno or 0, is_kept) from error
        if not 0 < count <= total - done:
            raise _failure(verb, path, label, offset, total, done, 0, is_kept)
        done += count


DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Of a device, its driver, or metadata that came back damaged; never of a folder that was chosen badly. ENOMEM is what
# ext4 says of a block of its own that the device has no more.
_DISK_FAILS = {errno.EIO, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.EBADMSG, errno.EREMOTEIO, errno.ENOMEM}


def refused(what: str, error: OSError, *, path: str, advice: str, failing: frozenset[int] = frozenset()) -> StoreError:
    """Returns the error for a call that the system refused: an `OffloadIOError` where the disk fails or is full.

    Args:
        what: begins the message: what cannot be done where.
        path: the file or folder.
        advice: ends the message where the disk does not fail.
        failing: further numbers that here mean that the disk fails.
    """
    number = error.errno or 0
    reason = f"{what}: {os.strerror(number)} (errno {number})"
    is_stopped = number == errno.EROFS and is_made_read_only(path)
    if number in DISK_FULL:
        advice = f"free space there or {advice}" if advice else "free space there"
    elif number in _DISK_FAILS | failing or is_stopped:
        advice = "the disk or its driver reports an error: look at the kernel log (dmesg)"
    else:
        return StoreError(f"{reason}; {advice}")
    return OffloadIOError(
        f"{reason}; {advice}",
        path=path,
        offset=0,
        wanted_bytes=0,
        got_bytes=0,
        errno=number,
    )


_ADVICE = {
    errno.ENOSPC: "the disk is full: free space there or give another directory with {option} DIR",
    errno.EDQUOT: "the user's disk quota is used up: free space there or give another directory with {option} DIR",
    errno.EFBIG: "the file may not grow further: raise the file size limit (ulimit -f)",
    errno.EIO: "the disk or its driver reports an error: look at the kernel log (dmesg) and give another {option} DIR",
    errno.EROFS: "a filesystem becomes read-only when its device fails: look at the kernel log (dmesg), and give "
    "another {option} DIR",
}


def _failure(
    verb: str, path: str, label: str, offset: int, wanted_bytes: int, got_bytes: int, number: int, is_kept: bool
) -> OffloadIOError:
    reason = f"{os.strerror(number)} (errno {number})" if number else "the transfer stopped making progress"
    advice = _ADVICE.get(number, "the file was cut short or the disk is failing: give another {option} DIR")
    place, option = (path, "--checkpoint") if is_kept else (f"the scratch file in {path}", "--disk")
    return OffloadIOError(
        f"{verb} {label} in {place} failed at byte {offset}: {format_bytes(got_bytes)} of "
        f"{format_bytes(wanted_bytes)} were transferred; {reason}; {advice.format(option=option)}",
        path=path,
        offset=offset,
        wanted_bytes=wanted_bytes,
        got_bytes=got_bytes,
        errno=number,
    )
