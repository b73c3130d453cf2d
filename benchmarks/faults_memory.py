"""Has each allocation of CPU tensors fail once, and counts what comes of it; a part of benchmarks/faults.py."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from faults_runs import BY, Ended, Forked

__all__ = ["allocations"]


def allocations(folder: Path, *, chosen: Callable[[int], bool]) -> Iterator[tuple[str, str, str]]:
    """Yields way to train, outcome and what was said, of each failure that is chosen.

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
            if chosen(number):
                found = _run(home, train, (number, second))
                yield name, _outcome(name, home, found, plain), "" if found is None else found.said
            else:
                yield name, "not run", ""


def _run(home: Path, train: Callable[[Path, Callable[[], None]], str], fail: tuple[int, int]) -> Ended | None:
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    return Forked(home, train, fail).ended()


def _outcome(name: str, home: Path, found: Ended | None, plain: Ended) -> str:
    if found is None:
        return "hangs"
    if found.digest:
        return "identical" if found.digest == plain.digest else "different"
    if not _is_clear(found):
        return "unclear"
    if name == "run" and (home / "kept").exists():
        resumed = Forked(home, BY[name]).ended()
        if resumed is None or resumed.digest != plain.digest:
            return "different when resumed"
    return "one clear error"


def _is_clear(found: Ended) -> bool:
    """Tells whether the last line is memwall's own and says what could not be had."""
    lines = found.said.strip().splitlines()
    last = next((line for line in reversed(lines) if line.startswith("memwall: ")), "")
    return "memory" in last and not lines[-1].startswith(("Traceback", "RuntimeError", "MemoryError"))
