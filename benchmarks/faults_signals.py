"""Sends signals to training runs at random instants, resumes them, and compares; a part of benchmarks/faults.py."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults_instants import Instant
from faults_runs import Ended, Forked, by_run
from plans import resumable_on_disk

from memwall.checkpoint.files import read_summary
from memwall.errors import MemwallError, UsageError

__all__ = ["NUM_SIGNALS", "SIGNALS", "signals"]

NUM_SIGNALS = 300
SIGNALS = ("KILL", "TERM", "INT", "INT twice", "STOP, CONT")
_GAN = Path(__file__).parents[1] / "tests" / "scripts" / "train_gan.py"
_SIGNALS_IN_A_CHAIN = 5
_STEPS = 120
_MOST_SECONDS_TO_END = 10.0
_NOTHING, _READABLE = "nothing committed", "readable"


def signals(folder: Path) -> Iterator[Instant]:
    """Yields chains of signals to one run, which is resumed after each, and then ends."""
    ways: dict[str, Callable[[Path, Callable[[], None]], str]] = {
        "checkpoint": partial(by_run, num_steps=_STEPS),
        "parameters and state on disk": _on_disk,
        "three models": partial(by_run, script=(str(_GAN), "--scaled"), num_steps=_STEPS),
    }
    plain: dict[str, Ended | None] = {}
    for number in range(NUM_SIGNALS // _SIGNALS_IN_A_CHAIN):
        name = list(ways)[number % len(ways)]
        sent = [SIGNALS[(number + place) % len(SIGNALS)] for place in range(_SIGNALS_IN_A_CHAIN)]
        names = tuple(f"{each}; {name}" for each in (*sent, "the end"))
        run = partial(_chain, folder / "signals", name, ways[name], sent, random.Random(number), plain)
        yield Instant(f"chain {number}", names, run)


def _chain(
    home: Path,
    name: str,
    train: Callable[[Path, Callable[[], None]], str],
    sent: list[str],
    draw: random.Random,
    plain: dict[str, Ended | None],
) -> Iterator[tuple[str, str]]:
    if name not in plain:
        plain[name] = _left_alone(home, train)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / "plan.json").write_bytes(resumable_on_disk().encode())
    is_committed = False
    for each in sent:
        outcome, said = _harmed(home, train, each, draw)
        if is_committed and outcome == _NOTHING:
            outcome = "lost"
        is_committed |= outcome == _READABLE
        yield outcome, said
    ended, whole = Forked(home, train).ended(), plain[name]
    is_same = ended is not None and whole is not None and ended.digest == whole.digest != ""
    yield "identical" if is_same else "different", "" if ended is None else ended.said


def _on_disk(folder: Path, arm: Callable[[], None]) -> str:
    return by_run(folder, arm, "--plan", str(folder / "plan.json"), "--disk", str(folder), num_steps=_STEPS)


def _left_alone(home: Path, train: Callable[[Path, Callable[[], None]], str]) -> Ended | None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / "plan.json").write_bytes(resumable_on_disk().encode())
    return Forked(home, train).ended()


def _harmed(
    home: Path, train: Callable[[Path, Callable[[], None]], str], name: str, draw: random.Random
) -> tuple[str, str]:
    """Sends one signal at a random instant, or two; returns what came of it."""
    run = Forked(home, train)
    num_steps = draw.randint(0, 6)
    deadline = time.monotonic() + 60
    while run.printed().count("step ") < num_steps and time.monotonic() < deadline:
        if run.is_over():
            return "over before", ""
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.1 if num_steps else 0.5))
    _send(run.process_id, name, draw)
    if name.startswith("STOP"):
        time.sleep(draw.uniform(0, 0.3))
        os.kill(run.process_id, signal.SIGCONT)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(run.process_id, signal.SIGKILL)
    began = time.monotonic()
    ended = run.ended(60)
    if ended is None:
        return "hangs", ""
    if time.monotonic() - began > _MOST_SECONDS_TO_END:
        return f"ends after more than {_MOST_SECONDS_TO_END:.0f} s", ended.said
    return _state_of(home / "kept"), ended.said


def _send(process_id: int, name: str, draw: random.Random) -> None:
    number = signal.Signals[f"SIG{name.split(' ')[0].rstrip(',')}"]
    os.kill(process_id, number)
    if name.endswith("twice"):
        time.sleep(draw.uniform(0, 0.05))
        try:
            os.kill(process_id, number)
        except ProcessLookupError:
            return


def _state_of(kept: Path) -> str:
    """Returns whether the last commit is whole, or there is none yet."""
    try:
        read_summary(kept)
    except UsageError:
        return _NOTHING
    except MemwallError:
        return "unreadable"
    return _READABLE
