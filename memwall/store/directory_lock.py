"""One run per checkpoint directory: a lock that the system takes back when the process ends, however that happens.

It is a record lock (fcntl(2), F_SETLK), which belongs to the process alone. A lock of flock(2) would live on in the
workers that a data loader has forked, and keep a run that was killed from being resumed while they wind down.
"""

import fcntl
import os
import socket
import threading
from contextlib import suppress

from memwall.errors import StoreError
from memwall.store.backend import refused
from memwall.store.own_file import open_own

_NAME = "memwall.lock"
_MAX_OWNER_BYTES = 200
_held: set[str] = set()  # a record lock does not keep its own process out
_guard = threading.Lock()


class DirectoryLock:
    """Keeps other runs out from the beginning until `release`.

    Args:
        directory: of the run.
        is_read_only: only keeps runs out while the directory is read, and writes nothing. A directory without a lock
            file, or whose filesystem cannot lock, has no run to keep out.

    Raises:
        StoreError: another run holds it, something else has the lock file's name, or the directory cannot be written
            to.
    """

    def __init__(self, directory: str, *, is_read_only: bool = False) -> None:
        self.directory = directory
        self._is_read_only = is_read_only
        self._fd = -1
        self._key = os.path.join(os.path.realpath(directory), _NAME)
        self._process_id = os.getpid()
        with _guard:
            if self._key in _held:
                raise self._refusal("this process")
            if is_read_only and not os.path.lexists(self._key):
                return
            try:
                self._fd = open_own(self._key, is_read_only=is_read_only)
            except OSError as error:
                verb = "read" if is_read_only else "write to"
                raise refused(
                    f"--checkpoint {directory}: {_NAME} cannot be opened there",
                    error,
                    path=self._key,
                    advice=f"give a directory that you may {verb}",
                ) from error
            try:
                self._take()
            except BaseException:
                os.close(self._fd)
                raise
            _held.add(self._key)

    def _take(self) -> None:
        try:
            fcntl.lockf(self._fd, (fcntl.LOCK_SH if self._is_read_only else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise self._refusal(os.pread(self._fd, _MAX_OWNER_BYTES, 0).decode(errors="replace").strip()) from error
        except OSError as error:
            if self._is_read_only:
                return
            raise StoreError(
                f"--checkpoint {self.directory}: its filesystem cannot lock files ({os.strerror(error.errno or 0)}), "
                "so two runs could overwrite each other there; give a directory on a local disk"
            ) from error
        if self._is_read_only:
            return
        # For the words of a refusal alone: a full disk may have room for the run all the same, which has reserved its
        # own, and one that fails is told of by what is written there next.
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {self._process_id} on {socket.gethostname()}\n".encode(), 0)

    def _refusal(self, owner: str) -> StoreError:
        return StoreError(
            f"--checkpoint {self.directory} is in use by {owner or 'another process'}; wait until that run has ended, "
            "or give this one a directory of its own"
        )

    def release(self) -> None:
        """Lets the next run in."""
        if self._process_id == os.getpid():
            with _guard:
                if self._key in _held:
                    _held.remove(self._key)
                    os.close(self._fd)
