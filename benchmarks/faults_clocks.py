"""Runs whose clock jumps, and runs that go on in another process than they began; a part of benchmarks/faults.py."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from faults_instants import Instant
from faults_runs import Ended, Forked, by_run, left_alone

__all__ = ["clocks", "resumes"]

_STEPS = 20


def clocks(folder: Path) -> Iterator[Instant]:
    """Yields runs whose wall clock jumps by a day forth and back while they train.

    It is asked for by each line of `--metrics`; a run in which nothing has asked for it fails.
    """
    plain = left_alone(folder / "plain", partial(by_run, num_steps=_STEPS))
    for seconds in (86_400.0, -86_400.0):
        name = f"{seconds / 3600:+.0f} h"
        yield Instant(name, (name,), partial(_jumped, folder / "jumped", seconds, plain))


def _jumped(home: Path, seconds: float, plain: Ended) -> list[tuple[str, str]]:
    ended = left_alone(home, partial(_with_jump, seconds))
    return [("identical" if ended.digest == plain.digest else "different", ended.said)]


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


def resumes(folder: Path) -> Iterator[Instant]:
    """Yields runs that go on with another number of threads: the digits of arithmetic may differ."""
    yield Instant("1 thread, then 2", ("1 thread, then 2",), partial(_with_two_threads, folder / "plain"))


def _with_two_threads(home: Path) -> list[tuple[str, str]]:
    left_alone(home, partial(by_run, num_steps=4))

    def with_two(home: Path, arm: Callable[[], None]) -> str:
        torch.set_num_threads(2)
        return by_run(home, arm, num_steps=8)

    ended = Forked(home, with_two).ended()
    is_done = ended is not None and ended.digest != ""
    return [("goes on" if is_done else "does not go on", "" if ended is None else ended.said)]
