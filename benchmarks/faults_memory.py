"""Has each allocation of CPU tensors fail once, and counts what comes of it; a part of benchmarks/faults.py."""

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from faults_instants import Instant
from faults_runs import BY, LEFT_CHANGED, Ended, Forked

__all__ = ["allocations"]


def allocations(folder: Path) -> Iterator[Instant]:
    """Yields one instant for each allocation of each way to train.

    Every allocation fails alone, and every fourth with a second one up to 64 later, which falls into the recovery.
    """
    for name, train in BY.items():
        home = folder / name
        plain = _run(home, train, (-1, -1))
        if plain is None or not plain.digest:
            raise SystemExit(f"{name}: a run that was left alone did not end: {plain}")
        draw = random.Random(name)
        for number in range(plain.count):
            second = number + draw.randint(1, 64) if number % 4 == 0 else -1
            yield Instant(f"{name} {number}", (name,), partial(_found, home, name, (number, second), plain))


def _found(home: Path, name: str, fail: tuple[int, int], plain: Ended) -> list[tuple[str, str]]:
    found = _run(home, BY[name], fail)
    said = "" if found is None else found.said
    return [(_outcome(name, home, found, plain), f"{fail}: {said}")]


def _run(home: Path, train: Callable[[Path, Callable[[], None]], str], fail: tuple[int, int]) -> Ended | None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    return Forked(home, train, fail).ended()


def _outcome(name: str, home: Path, found: Ended | None, plain: Ended) -> str:
    if found is None:
        return "hangs"
    if found.status == LEFT_CHANGED:
        return "leaves changes"
    if found.digest:
        return "identical" if found.digest == plain.digest else "different"
    if not _is_clear(found):
        return "unclear"
    if (home / "kept").exists():
        resumed = Forked(home, BY[name]).ended()
        if resumed is None or resumed.digest != plain.digest:
            return "different when resumed"
    return "one clear error"


def _is_clear(found: Ended) -> bool:
    """Tells whether the last words are memwall's own and say what could not be had.

    `memwall run` shows the script's traceback before, as Python does; one of a failure while another was handled is
    one too many.
    """
    begin = found.said.rfind("\nmemwall: ") + 1
    last = found.said[begin:]
    is_raw = "Traceback" in last or found.said.count("Traceback (most") > 1 or found.status == 1
    return last.startswith("memwall: ") and "memory" in last and not is_raw
