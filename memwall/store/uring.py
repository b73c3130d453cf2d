"""Reads and writes through io_uring: the other engine that the store's threads may move blocks with.

Each thread has a ring of its own, so none waits for another's lock, and a block takes one system call, as without.
Where a disk is faster so is measured by `memwall.machine.disk_race`.
"""

import ctypes
import errno
import functools
import os
import threading

from memwall.native import load_library
from memwall.store.backend import SystemBackend

__all__ = ["Ring", "UringBackend"]

_POINTER, _U64 = ctypes.c_void_p, ctypes.c_uint64
_SIGNATURES = {
    "uring_open": (_POINTER, (ctypes.c_uint32, ctypes.POINTER(ctypes.c_int))),
    "uring_close": (None, (_POINTER,)),
    "uring_queue": (ctypes.c_int, (_POINTER, ctypes.c_int, ctypes.c_int, _POINTER, _U64, _U64, _U64)),
    "uring_take": (ctypes.c_int64, (_POINTER, ctypes.POINTER(_U64))),
    "uring_move": (ctypes.c_int64, (_POINTER, ctypes.c_int, ctypes.c_int, _POINTER, _U64, _U64)),
}


class Ring:
    """A ring of the thread that makes it, and of its process: a child forked from it needs another one.

    Args:
        depth: the most requests at once.

    Raises:
        OSError: the kernel or the container refuses (EPERM, ENOSYS), or the installation built no library (ENOSYS).
    """

    def __init__(self, depth: int = 1) -> None:
        self._handle: int | None = None
        self._library = _library()
        number = ctypes.c_int()
        self._handle = self._library.uring_open(depth, ctypes.byref(number))
        if self._handle is None:
            raise OSError(number.value, os.strerror(number.value))
        self.process_id = os.getpid()

    def move(self, fd: int, data: memoryview, offset: int, *, is_write: bool) -> int:
        """Write some of `data` to a file, or fill some of it from there; other threads run meanwhile.

        Returns:
            The number of bytes moved.

        Raises:
            OSError: as of pread(2) and pwrite(2).
        """
        memory = ctypes.byref(ctypes.c_char.from_buffer(data))
        return _checked(self._library.uring_move(self._handle, is_write, fd, memory, data.nbytes, offset))

    def queue(self, fd: int, data: memoryview, offset: int, tag: int, *, is_write: bool) -> None:
        """Begin a request at the next `take`. Its memory must stay until it has been taken."""
        memory = ctypes.byref(ctypes.c_char.from_buffer(data))
        number = self._library.uring_queue(self._handle, is_write, fd, memory, data.nbytes, offset, tag)
        _checked(-number)

    def take(self) -> tuple[int, int]:
        """Wait for a request, of which there must be one: its tag, and the number of bytes moved.

        Raises:
            OSError: as `move`.
        """
        tag = _U64()
        moved = _checked(self._library.uring_take(self._handle, ctypes.byref(tag)))
        return tag.value, moved

    def __del__(self) -> None:
        """A thread's ring ends with the thread; a child closes its copy, which leaves its parent's as it is."""
        if self._handle is not None:
            self._library.uring_close(self._handle)


class UringBackend(SystemBackend):
    """`SystemBackend`, with reads and writes by io_uring; safe to use from several threads, and after a fork.

    Raises:
        OSError: see `Ring`.
    """

    def __init__(self) -> None:
        Ring()
        self._of_thread = threading.local()

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """See `IOBackend`."""
        ring = None if data.readonly or not data.nbytes else self._ring()  # ctypes names no address of such memory
        return super().pwrite(fd, data, offset) if ring is None else ring.move(fd, data, offset, is_write=True)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        """See `IOBackend`."""
        ring = self._ring() if buffer.nbytes else None
        return super().pread(fd, buffer, offset) if ring is None else ring.move(fd, buffer, offset, is_write=False)

    def _ring(self) -> Ring | None:
        """This thread's; None where there is none to be had now, as of descriptors: the system's calls do as well."""
        ring: Ring | None = getattr(self._of_thread, "ring", None)
        if ring is None or ring.process_id != os.getpid():
            try:
                ring = self._of_thread.ring = Ring()
            except OSError:
                return None
        return ring


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


@functools.cache
def _library() -> ctypes.CDLL:
    library = load_library("uring", _SIGNATURES)
    if library is None:
        raise OSError(errno.ENOSYS, "memwall/native/uring was not built: there was no C compiler")
    return library
