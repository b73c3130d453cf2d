"""Keeps what a library in C prints out of the script's standard output."""

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STANDARD_OUTPUT = 1
_guard = threading.Lock()


@contextmanager
def nothing_printed() -> Iterator[None]:
    """Leads file descriptor 1 to nowhere while the block runs, for output that cannot be turned off otherwise.

    The descriptor is the whole process's, so what another thread writes to it meanwhile is lost: the block has to be
    short. What was printed before and waits in a buffer is not lost.
    """
    with _guard:
        try:
            kept = os.dup(_STANDARD_OUTPUT)
        except OSError:  # closed, so that nothing can be printed there
            yield
            return
        try:
            _flush()
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.dup2(nowhere, _STANDARD_OUTPUT)
            finally:
                os.close(nowhere)
            yield
        finally:
            _flush()
            os.dup2(kept, _STANDARD_OUTPUT)
            os.close(kept)


def _flush() -> None:
    """Empties the buffers of C's own streams; Python's are others, and stay as they are."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).fflush(None)
