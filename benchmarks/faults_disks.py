"""Runs on file systems that fill up, become read-only or slow, or fail to write; a part of benchmarks/faults.py."""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults_instants import Instant
from faults_runs import NUM_STEPS, Ended, Forked, by_run, left_alone
from faults_small_disk import SmallDisk, small_disk
from plans import resumable_on_disk

__all__ = ["file_systems"]

_STEPS, _SEEDS, _CUTS = 150, 10, 25
_BYTES_TO_CUT = 144 << 20


def file_systems(folder: Path) -> Iterator[Instant]:
    """Yields instants of each kind of fault; each on a small ext4 of its own, in a loop device.

    What is committed on the broken file system is carried on from a copy of it, on one that works. EIO is the kernel's
    own, of a device that has lost blocks. Which call of a run it meets is left to chance, so that, beside it, each call
    that writes to a checkpoint's folder fails once, as do all after it; these only say EIO, the disk is whole.
    """
    if os.geteuid():
        raise SystemExit("file-systems: only root mounts")
    train = partial(by_run, num_steps=_STEPS)
    plain = left_alone(folder / "plain", train)
    for kind, harm in (("full", _fill), ("read-only", _stop_writing), ("slow", _slow)):
        for seed in range(_SEEDS):
            yield Instant(f"{kind} {seed}", (kind,), partial(_on_a_small_disk, folder, train, harm, seed, plain))
    yield from _cuts(folder, train, plain)
    yield from _failing_writes(folder / "writes")


def _cuts(folder: Path, train: Callable[[Path, Callable[[], None]], str], plain: Ended) -> Iterator[Instant]:
    """Yields runs whose device loses blocks: those of the checkpoint, or those of parameters and state as well."""
    (folder / "plan.json").write_bytes(resumable_on_disk().encode())
    on_disk = partial(_with_scratch, folder / "plan.json")
    for name, way in (("checkpoint", train), ("parameters, state and checkpoint", on_disk)):
        names = (f"EIO; {name}", f"EIO; {name}; --resume there")
        for seed in range(_CUTS):
            yield Instant(f"EIO {name} {seed}", names, partial(_on_a_cut_disk, folder, way, train, seed, plain))


def _with_scratch(plan: Path, home: Path, arm: Callable[[], None]) -> str:
    return by_run(home, arm, "--plan", str(plan), "--disk", str(home / "scratch"), num_steps=_STEPS)


def _on_a_cut_disk(
    folder: Path,
    way: Callable[[Path, Callable[[], None]], str],
    train: Callable[[Path, Callable[[], None]], str],
    seed: int,
    plain: Ended,
) -> Iterator[tuple[str, str]]:
    """Harms a run, goes on from what can be read of its checkpoint, and then on the broken disk itself."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    with small_disk(folder, _BYTES_TO_CUT) as disk:
        ended = _harmed(disk, way, partial(_cut, random.Random(seed)), seed * _STEPS // _CUTS, is_stopped=True)
        if ended is None:
            yield from [("hangs", "")] * 2
            return
        is_whole = disk.rescue(copy / "kept")
        yield _from_what_is_left(copy, train, ended, plain, is_whole=is_whole)
        there = Forked(disk.beside, way).ended(180)
    if there is None:
        yield "hangs", ""
    else:
        yield _outcome(there, plain, (6,)), there.said


def _from_what_is_left(
    copy: Path, train: Callable[[Path, Callable[[], None]], str], ended: Ended, plain: Ended, *, is_whole: bool
) -> tuple[str, str]:
    """Goes on on a disk that works: to the same end where each block could be read, else that or one clear error."""
    resumed = Forked(copy, train).ended()
    if resumed is None:
        return "hangs when resumed", ended.said
    after = _outcome(resumed, plain, (2,))  # the disk works now, and what lies there is damaged
    if after == "identical" or (after == "one clear error" and not is_whole):
        return _outcome(ended, plain, (6,)), ended.said
    return f"{after} when resumed from what is {'' if is_whole else 'not '}whole", ended.said + resumed.said


def _outcome(ended: Ended, plain: Ended, statuses: tuple[int, ...]) -> str:
    if ended.digest:
        return "identical" if ended.digest == plain.digest else "different"
    return _judged(ended, statuses)


def _cut(draw: random.Random, disk: SmallDisk) -> None:
    """Cuts the device off where a file of the run has been written, or, every third time, anywhere."""
    ranges = [blocks for path in disk.files() for blocks in disk.blocks_of(path)] if draw.random() < 2 / 3 else []
    blocks = draw.choice(ranges) if ranges else range(_BYTES_TO_CUT // 16, _BYTES_TO_CUT)
    disk.cut(draw.choice(blocks) // 512 * 512)


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
    return [_resumed(home, partial(by_run, num_steps=NUM_STEPS), ended, plain, (6,))]


def _on_a_small_disk(
    folder: Path,
    train: Callable[[Path, Callable[[], None]], str],
    harm: Callable[[SmallDisk], None],
    seed: int,
    plain: Ended,
) -> list[tuple[str, str]]:
    with small_disk(folder, 48 << 20) as disk:
        ended = _harmed(disk, train, harm, seed * random.Random(seed).randint(1, 12))
        if ended is None:
            return [("hangs", "")]
        copy = folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        shutil.copytree(disk.mount / "run", copy / "kept")
    if ended.digest:
        return [("identical" if ended.digest == plain.digest else "different", ended.said)]
    return [_resumed(copy, train, ended, plain, (6,))]


def _harmed(
    disk: SmallDisk,
    train: Callable[[Path, Callable[[], None]], str],
    harm: Callable[[SmallDisk], None],
    steps: int,
    *,
    is_stopped: bool = False,
) -> Ended | None:
    """Trains with a small disk, which is harmed after so many steps; after 0 before anything is committed.

    Args:
        is_stopped: whether the run waits meanwhile, which would be over else before a place to harm is found.
    """
    run = Forked(disk.beside, train)
    deadline = time.monotonic() + 60
    while run.printed().count("step ") < steps and time.monotonic() < deadline and not run.is_over():
        time.sleep(0.002)
    if is_stopped and not run.is_over():
        os.kill(run.process_id, signal.SIGSTOP)
    harm(disk)
    if is_stopped and not run.is_over():
        os.kill(run.process_id, signal.SIGCONT)
    return run.ended(180)


def _resumed(
    home: Path,
    train: Callable[[Path, Callable[[], None]], str],
    ended: Ended,
    plain: Ended,
    statuses: tuple[int, ...],
) -> tuple[str, str]:
    """Goes on where a run has ended early, with one of these statuses; returns what came of it."""
    resumed = Forked(home, train).ended()
    if resumed is None or resumed.digest != plain.digest:
        return "different when resumed", ended.said + ("" if resumed is None else resumed.said)
    return _judged(ended, statuses), ended.said


def _judged(ended: Ended, statuses: tuple[int, ...]) -> str:
    """Tells whether a run's last words are memwall's own, with the exit status of what happened."""
    last = ended.said[ended.said.rfind("\nmemwall: ") + 1 :]
    is_clear = ended.status in statuses and last.startswith("memwall: ") and "Traceback" not in last
    return "one clear error" if is_clear else f"unclear: status {ended.status}"


def _fill(disk: SmallDisk) -> None:
    """Takes all the room there is."""
    with (disk.mount / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 16))
        except OSError:
            return


def _stop_writing(disk: SmallDisk) -> None:
    """Has the file system stop writing, as the kernel does after an error of the device."""
    subprocess.run(["mount", "-o", "remount,abort", disk.mount], check=False, capture_output=True)


def _slow(disk: SmallDisk) -> None:
    """Keeps the disk busy with synced writes for a while."""
    deadline = time.monotonic() + 3
    with (disk.mount / "filler").open("wb", buffering=0) as file:
        while time.monotonic() < deadline:
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            file.seek(0)
