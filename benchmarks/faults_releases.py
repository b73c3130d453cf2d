"""Runs that are killed under one release of torch and go on under another; a part of benchmarks/faults.py."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from faults_instants import Instant
from plans import resumable_on_disk

__all__ = ["releases"]

_ROOT = Path(__file__).parents[1]
_OTHERS = ("2.11.0", "2.14.1")
_SCRIPTS = _ROOT / "tests" / "scripts"
_STEPS, _KILLED_AFTER = 12, 4
_MOST_SECONDS = 300
_WAYS: dict[str, tuple[str, ...]] = {
    "checkpoint": ("--budget", "1TiB", str(_SCRIPTS / "train_resumable.py")),
    "parameters and state on disk": ("--plan", "plan.json", "--disk", ".", str(_SCRIPTS / "train_resumable.py")),
    "three models": ("--budget", "1TiB", str(_SCRIPTS / "train_gan.py"), "--scaled"),
}


def releases(folder: Path) -> Iterator[Instant]:
    """Yields runs that another release of torch than the one that began them goes on with, both ways.

    Each release has an environment on top of this one, from `make test-torch`; without it, nothing is run.
    """
    own = torch.__version__.partition("+")[0]
    for other in _OTHERS:
        for first, second in ((own, other), (other, own)):
            for way in _WAYS:
                name = f"torch {first}, then {second}; {way}"
                yield Instant(name, (name,), partial(_resumed, folder / "releases", first, second, way))


def _resumed(home: Path, first: str, second: str, way: str) -> list[tuple[str, str]]:
    """Kills a run after some steps, and goes on; a step is committed when the one after it has ended, at the latest."""
    for release in (first, second):
        if not _python(release).exists():
            return [("not run", f"torch {release} is not here: make test-torch RELEASE={release} installs it")]
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (home / "plan.json").write_bytes(resumable_on_disk().encode())
    begun = _train(home, first, way, killed_after=_KILLED_AFTER)
    if begun.steps != list(range(_KILLED_AFTER + 1)):
        return [("does not begin", begun.said)]
    ended = _train(home, second, way)
    last = ended.said.splitlines()[-1] if ended.said else ""
    if ended.status == 0 and 0 < ended.steps[0] <= _KILLED_AFTER + 1 and ended.steps[-1] == _STEPS - 1:
        return [("goes on" if _names_both(ended.said, first, second) else "names no release", ended.said)]
    is_clear = last.startswith("memwall: ") and _names_both(last, first, second) and "Traceback" not in ended.said
    return [("one clear error" if is_clear else f"unclear: status {ended.status}", ended.said)]


class _Run(NamedTuple):
    """Says what a run did."""

    status: int
    steps: list[int]
    """Numbers of the steps that it has printed."""
    said: str


def _train(home: Path, release: str, way: str, killed_after: int | None = None) -> _Run:
    command: Sequence[str | Path] = [
        *(_python(release), "-m", "memwall", "run", "--checkpoint", "kept", "--resume", *_WAYS[way]),
        *("--steps", str(_STEPS), "--out", "out"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT)}
    steps: list[int] = []
    with (home / "said.txt").open("w+") as said:
        with subprocess.Popen(
            command, cwd=home, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                found = re.match(r"step (\d+)\b", line)
                steps += [int(found.group(1))] if found else []
                if steps and steps[-1] == killed_after:
                    process.kill()
                    break
            try:
                status = process.wait(_MOST_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        said.seek(0)
        return _Run(status, steps, said.read())


def _python(release: str) -> Path:
    if release == torch.__version__.partition("+")[0]:
        return Path(sys.executable)
    return _ROOT / ".venv" / f"torch-{release}" / "bin" / "python"


def _names_both(said: str, first: str, second: str) -> bool:
    return re.search(rf"under torch {re.escape(first)}\S*, and this is torch {re.escape(second)}", said) is not None
