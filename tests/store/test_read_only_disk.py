"""A disk that the kernel has stopped writing to has failed; one that was mounted read-only was chosen badly."""

import errno
import os
from pathlib import Path

import pytest

from memwall import mounts
from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import refused

MOUNTS = {
    "by the kernel, since Linux 6.15": ("rw,relatime", "rw,errors=remount-ro,emergency_ro", 6),
    "by the kernel, before": ("rw,relatime", "ro,errors=remount-ro", 6),
    "by whoever mounted it": ("ro,relatime", "ro", 2),
    "by whoever mounted a folder of it": ("ro,relatime", "rw", 2),
}


@pytest.mark.parametrize(("mount", "filesystem", "exit_status"), MOUNTS.values(), ids=MOUNTS)
@pytest.mark.parametrize("name", ["there", "not/there"])
def test_a_disk_that_was_made_read_only_has_the_status_of_who_did_it(
    mount: str, filesystem: str, exit_status: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    device = tmp_path.stat().st_dev
    mountinfo = tmp_path / "mountinfo"
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mountinfo.write_text(f"42 27 {numbers} / {tmp_path} {mount} shared:1 - ext4 /dev/loop0 {filesystem}\n")
    monkeypatch.setattr(mounts, "_MOUNTINFO", mountinfo)
    error = refused(
        "no checkpoint",
        OSError(errno.EROFS, os.strerror(errno.EROFS)),
        path=str(tmp_path / name),
        advice="give another one",
    )
    assert (type(error), error.exit_status) == (OffloadIOError if exit_status == 6 else StoreError, exit_status)


def test_what_is_refused_elsewhere_does_not_ask_for_the_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_MOUNTINFO", tmp_path / "missing")
    for number in (errno.EACCES, errno.EROFS):
        error = refused("no file", OSError(number, os.strerror(number)), path=str(tmp_path), advice="give another one")
        assert error.exit_status == 2
