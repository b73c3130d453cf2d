"""Opens files of a checkpoint directory by name, where somebody else may have left something under that name."""

import fcntl
import os
import stat

from memwall.errors import StoreError


def open_own(path: str, *, is_read_only: bool = False) -> int:
    """Returns a descriptor of a regular file, never of what a link leads to.

    A file to write to is created empty where there is none, readable by its owner alone. One that is there must have
    no second name, and must belong to this user or to the directory's owner: what is written would be theirs else.

    Raises:
        StoreError: something else has the name.
        OSError: the system refuses.
    """
    # Non-blocking, because a named pipe would wait for its other end.
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT
    if os.path.islink(path):
        raise _refusal(path, "is a symbolic link")
    fd = os.open(path, flags, 0o600)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise _refusal(path, "is not a regular file")
        if not is_read_only:
            if found.st_nlink > 1:
                raise _refusal(path, f"is one of {found.st_nlink} names of a file (hard links)")
            owner_ids = {os.geteuid(), os.stat(os.path.dirname(path) or ".").st_uid}
            if found.st_uid not in owner_ids:
                raise _refusal(path, f"belongs to another user (id {found.st_uid})")
        # What reads and writes it waits for the disk.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_NONBLOCK)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _refusal(path: str, reason: str) -> StoreError:
    return StoreError(
        f"{path} {reason}; expected a file that memwall made there: remove it if nobody needs it, or give another "
        "--checkpoint DIR"
    )
