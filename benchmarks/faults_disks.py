"""Runs on file systems that fill up, become read-only or slow, or fail to write; a part of benchmarks/faults.py."""

import ctypes
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults_instants import Instant
from faults_runs import NUM_STEPS, Ended, Forked, by_run, left_alone

__all__ = ["file_systems"]

_STEPS, _SEEDS = 150, 10


def file_systems(folder: Path) -> Iterator[Instant]:
    """Yields instants of each kind of fault; each on a small ext4 of its own, in a loop device.

    What is committed on the broken file system is carried on from a copy of it, on one that works. And each call that
    writes to a checkpoint's folder fails once with EIO, as do all after it; these calls only say so, the disk is whole.
    """
    if os.geteuid():
        raise SystemExit("file-systems: only root mounts")
    train = partial(by_run, num_steps=_STEPS)
    plain = left_alone(folder / "plain", train)
    for kind, harm in (("full", _fill), ("read-only", _stop_writing), ("slow", _slow)):
        for seed in range(_SEEDS):
            yield Instant(f"{kind} {seed}", (kind,), partial(_on_a_small_disk, folder, train, harm, seed, plain))
    yield from _failing_writes(folder / "writes")


def _failing_writes(home: Path) -> Iterator[Instant]:
    plain = left_alone(home, partial(_with_failing_writes, -1))
    for number in range(int((home / "writes.txt").read_text())):
        yield Instant(f"EIO {number}", ("EIO (simulated)",), partial(_failed, home, number, plain))


def _with_failing_writes(number: int, home: Path, arm: Callable[[], None]) -> str:
    library = ctypes.CDLL(None)
    library.faults_arm_writes(ctypes.c_long(number), os.fsencode(home / "kept"))
    digest = by_run(home, arm, num_steps=NUM_STEPS)
    (home / "writes.txt").write_text(str(library.faults_count_writes()))
    return digest


def _failed(home: Path, number: int, plain: Ended) -> list[tuple[str, str]]:
    shutil.rmtree(home)
    home.mkdir()
    ended = Forked(home, partial(_with_failing_writes, number)).ended()
    if ended is None:
        return [("hangs", "")]
    if ended.digest:
        return [("identical" if ended.digest == plain.digest else "different", ended.said)]
    return [_resumed(home, partial(by_run, num_steps=NUM_STEPS), ended, plain)]


def _on_a_small_disk(
    folder: Path,
    train: Callable[[Path, Callable[[], None]], str],
    harm: Callable[[Path], None],
    seed: int,
    plain: Ended,
) -> list[tuple[str, str]]:
    image, mount = folder / "disk.img", folder / "disk"
    mount.mkdir(exist_ok=True)
    subprocess.run(["truncate", "-s", "48M", image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "nodiscard", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    home = mount / "run"
    home.mkdir()
    own = folder / "beside"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    (own / "kept").symlink_to(home)
    try:
        run = Forked(own, train)
        steps = seed * random.Random(seed).randint(1, 12)  # the first before anything is committed
        deadline = time.monotonic() + 60
        while run.printed().count("step ") < steps and time.monotonic() < deadline and not run.is_over():
            time.sleep(0.002)
        harm(mount)
        ended = run.ended(180)
        if ended is None:
            return [("hangs", "")]
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copytree(home, copy / "kept")
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
        image.unlink()
    if ended.digest:
        return [("identical" if ended.digest == plain.digest else "different", ended.said)]
    return [_resumed(copy, train, ended, plain)]


def _resumed(
    home: Path, train: Callable[[Path, Callable[[], None]], str], ended: Ended, plain: Ended
) -> tuple[str, str]:
    """Goes on where a run has ended early; returns what came of it."""
    resumed = Forked(home, train).ended()
    if resumed is None or resumed.digest != plain.digest:
        return "different when resumed", ended.said + ("" if resumed is None else resumed.said)
    last = ended.said[ended.said.rfind("\nmemwall: ") + 1 :]
    is_clear = ended.status in (2, 6) and last.startswith("memwall: ") and "Traceback" not in last
    return "one clear error" if is_clear else f"unclear: status {ended.status}", ended.said


def _fill(mount: Path) -> None:
    """Takes all the room there is."""
    with (mount / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def _stop_writing(mount: Path) -> None:
    """Has the file system stop writing, as the kernel does after an error of the device."""
    subprocess.run(["mount", "-o", "remount,abort", mount], check=False, capture_output=True)


def _slow(mount: Path) -> None:
    """Keeps the disk busy with synced writes for a while."""
    deadline = time.monotonic() + 3
    with (mount / "filler").open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            file.seek(0)
