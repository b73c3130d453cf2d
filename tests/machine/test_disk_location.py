"""A directory for offloaded bytes is judged before the run, in words that say what to do."""

import errno
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from memwall import mounts
from memwall.errors import OffloadIOError, StoreError
from memwall.machine import disk_probe
from memwall.machine.disk_location import check_directory, default_directory, filesystem_of
from memwall.machine.disk_probe import known_disk, probe_disk
from memwall.machine.tiers import Tier


def refusal(path: Path | str, needed_bytes: int = 0) -> str:
    """The message `check_directory` refuses `path` with."""
    with pytest.raises(StoreError) as caught:
        check_directory(path, needed_bytes)
    return str(caught.value)


def test_a_good_directory_passes_and_stays_empty(tmp_path: Path) -> None:
    check_directory(tmp_path, needed_bytes=4096)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_directory(tmp_path: Path) -> None:
    path = tmp_path / "none"
    assert refusal(path) == (
        f"--disk {path}: this directory does not exist; create it (mkdir -p {path}) or give another one"
    )


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert refusal(path) == f"--disk {path}: this is a file; give a directory on a disk with free space"


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = list(os.statvfs(tmp_path))
    fields[1], fields[4] = 4096, 256
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(fields))
    assert refusal(tmp_path, 3 << 20) == (
        f"--disk {tmp_path}: 3.0 MiB are needed there, 1.0 MiB are free; free 2.0 MiB or give a directory on a larger "
        "disk"
    )


def test_a_ram_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = os.stat(tmp_path).st_dev
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 1 999:1 / /proc rw - proc proc rw\n"
        f"25 1 {os.major(device)}:{os.minor(device)} / {tmp_path} rw,relatime shared:2 - tmpfs tmpfs rw,size=1g\n"
    )
    monkeypatch.setattr(mounts, "_MOUNTINFO", table)
    assert refusal(tmp_path) == (
        f"--disk {tmp_path}: this is a RAM disk (tmpfs), so moving bytes there would free no memory; "
        "give a directory on a real disk"
    )


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this machine has no /dev/shm")
def test_the_shared_memory_of_this_machine_is_a_ram_disk() -> None:
    assert filesystem_of("/dev/shm") == "tmpfs"
    assert "is a RAM disk" in refusal("/dev/shm")


@pytest.mark.skipif(not os.path.isdir("/sys/kernel"), reason="this machine has no /sys")
def test_a_directory_without_permission() -> None:
    message = refusal("/sys/kernel")
    assert message.startswith("--disk /sys/kernel: no file can be created there (")
    assert message.endswith("; change its permissions or give a directory that you may write to")


def test_a_read_only_filesystem(tmp_path: Path) -> None:
    image, mount = tmp_path / "image", tmp_path / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 2 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False)
    mounted = subprocess.run(["mount", "-o", "loop,ro", str(image), str(mount)], capture_output=True, check=False)
    if made.returncode or mounted.returncode:
        pytest.skip("cannot make and mount a loop filesystem here (needs root and a loop device)")
    try:
        assert refusal(mount) == (
            f"--disk {mount}: its filesystem is mounted read-only; remount it or give another directory"
        )
    finally:
        subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.parametrize(
    ("mount", "filesystem", "exit_status"), [("rw", "ro,errors=remount-ro", 6), ("ro", "ro", 2)], ids=["kernel", "user"]
)
def test_a_disk_that_the_kernel_has_stopped_writes_to_has_failed(
    mount: str, filesystem: str, exit_status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, mountinfo = tmp_path.stat().st_dev, tmp_path / "mountinfo"
    numbers = f"{os.major(device)}:{os.minor(device)}"
    mountinfo.write_text(f"42 27 {numbers} / {tmp_path} {mount} shared:1 - ext4 /dev/loop0 {filesystem}\n")
    monkeypatch.setattr(mounts, "_MOUNTINFO", mountinfo)
    monkeypatch.setattr(tempfile, "TemporaryFile", _failing(errno.EROFS))
    with pytest.raises(StoreError, match="ead-only") as caught:
        check_directory(tmp_path)
    assert caught.value.exit_status == exit_status


def test_a_disk_that_does_not_answer_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("memwall.machine.disk_location.os.stat", _failing(errno.EIO))
        with pytest.raises(OffloadIOError, match="Input/output error"):
            check_directory("/mnt/gone")


def _failing(number: int) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    return fail


def test_an_unknown_filesystem_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_MOUNTINFO", tmp_path / "absent")
    check_directory(tmp_path)
    assert filesystem_of(tmp_path) is None


def test_the_default_is_the_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_directory() == str(tmp_path)


def test_an_unsuitable_default_asks_for_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(StoreError) as caught:
        default_directory()
    assert str(caught.value) == (
        f"offloading needs a directory on a disk, and the default one is unsuitable ({tmp_path}/none: this directory "
        f"does not exist; create it (mkdir -p {tmp_path}/none) or give another one); name one with --disk DIR"
    )


def test_a_probe_measures_both_ways_and_leaves_nothing(tmp_path: Path) -> None:
    speed = probe_disk(tmp_path, num_bytes=8 << 20)
    assert speed.write_bytes_per_second > 1e5
    assert speed.read_bytes_per_second > 1e5
    assert list(tmp_path.iterdir()) == []


def test_a_probe_checks_the_directory_first(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist"):
        probe_disk(tmp_path / "none")


def test_a_disk_is_measured_once_in_ten_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN folders on one device WHEN sessions ask for its speed THEN it stands, and what is free is as it is now."""
    now, probed = [0.0], []

    def probe(directory: Path, num_bytes: int) -> Tier:
        probed.append(directory)
        return Tier(name="disk", write_bytes_per_second=1.0, read_bytes_per_second=len(probed), free_bytes=1)

    monkeypatch.setattr(disk_probe, "_measured", {})
    monkeypatch.setattr(disk_probe, "probe_disk", probe)
    monkeypatch.setattr(disk_probe.time, "monotonic", lambda: now[0])
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    tiers = [known_disk(folder, 1 << 20) for folder in folders]
    assert [tier.read_bytes_per_second for tier in tiers] == [1, 1]
    assert [tier.directory for tier in tiers] == list(map(str, folders))
    assert all(tier.free_bytes > 1 for tier in tiers)
    folders[1].rmdir()
    with pytest.raises(StoreError, match="does not exist"):
        check_directory(folders[1])
    now[0] = 601.0
    assert known_disk(folders[0], 1 << 20).read_bytes_per_second == 2
    assert probed == [folders[0], folders[0]]
