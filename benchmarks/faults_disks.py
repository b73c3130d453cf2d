"""Runs on file systems that fill up, become read-only or are slow, and after a clock jumped; a part of faults.py."""

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from faults_runs import Ended, Forked, by_run

__all__ = ["clocks", "file_systems", "threads"]

_STEPS, _SEEDS = 20, 3


def file_systems(folder: Path, *, share: float) -> Iterator[tuple[str, str, str]]:
    """Yields kind of fault, outcome and what was said; each on a small ext4 of its own, in a loop device.

    What is committed on the broken file system is carried on from a copy of it, on one that works.
    """
    train = partial(by_run, num_steps=_STEPS)
    plain = _plain(folder, train)
    if os.geteuid():
        yield from ((kind, "not run", "only root mounts") for kind in ("full", "read-only", "slow"))
        return
    for kind, harm in (("full", _fill), ("read-only", _stop_writing), ("slow", _slow)):
        for seed in range(_SEEDS):
            if seed >= max(1, round(_SEEDS * share)):
                yield kind, "not run", ""
                continue
            yield kind, *_on_a_small_disk(folder, train, harm, random.Random(seed), plain)


def _on_a_small_disk(
    folder: Path,
    train: Callable[[Path, Callable[[], None]], str],
    harm: Callable[[Path], None],
    draw: random.Random,
    plain: Ended,
) -> tuple[str, str]:
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
        steps = draw.randint(1, 12)
        deadline = time.monotonic() + 60
        while run.printed().count("step ") < steps and time.monotonic() < deadline and not run.is_over():
            time.sleep(0.002)
        harm(mount)
        ended = run.ended(180)
        if ended is None:
            return "hangs", ""
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copytree(home, copy / "kept")
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
        image.unlink()
    if ended.digest:
        return ("identical" if ended.digest == plain.digest else "different"), ended.said
    resumed = Forked(copy, train).ended()
    if resumed is None or resumed.digest != plain.digest:
        return "different when resumed", ended.said + ("" if resumed is None else resumed.said)
    last = ended.said.strip().splitlines()[-1] if ended.said.strip() else ""
    return ("one clear error" if ended.status == 6 and "Traceback" not in last else "unclear"), ended.said


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


def clocks(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields outcomes of runs whose wall clock jumps by a day forth and back while they train.

    It is asked for by each line of `--metrics`; a run in which nothing has asked for it fails.
    """
    train = partial(by_run, num_steps=_STEPS)
    plain = _plain(folder, train)
    for seconds in (86_400.0, -86_400.0):
        yield f"{seconds / 3600:+.0f} h", *_compared(_plain(folder, partial(_with_jump, seconds)), plain)


def _with_jump(seconds: float, folder: Path, arm: Callable[[], None]) -> str:
    real, calls = time.time, [0]

    def jumps() -> float:
        calls[0] += 1
        return real() + (seconds if calls[0] > 2 else 0.0)

    time.time = jumps
    try:
        digest = by_run(folder, arm, "--metrics", str(folder / "steps.jsonl"), num_steps=_STEPS)
    finally:
        time.time = real
    if calls[0] <= 2:
        raise RuntimeError("nothing asked for the time after the clock's jump")
    return digest


def threads(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Yields the outcome of a run that goes on with another number of threads: the digits of arithmetic may differ."""
    train = partial(by_run, num_steps=8)
    short = partial(by_run, num_steps=4)
    shutil.rmtree(folder / "plain", ignore_errors=True)
    (folder / "plain").mkdir()
    begun = Forked(folder / "plain", short).ended()

    def with_two(home: Path, arm: Callable[[], None]) -> str:
        torch.set_num_threads(2)
        return train(home, arm)

    ended = None if begun is None or not begun.digest else Forked(folder / "plain", with_two).ended()
    is_done = ended is not None and ended.digest != ""
    yield "1, then 2", "goes on" if is_done else "does not go on", "" if ended is None else ended.said


def _plain(folder: Path, train: Callable[[Path, Callable[[], None]], str]) -> Ended:
    home = folder / "plain"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    ended = Forked(home, train).ended()
    if ended is None or not ended.digest:
        raise SystemExit(f"a run that was left alone did not end: {ended}")
    return ended


def _compared(ended: Ended, plain: Ended) -> tuple[str, str]:
    return ("identical" if ended.digest == plain.digest else "different"), ended.said
