"""Looks for races in memwall's stream code: random schedules of it, and faults brought back that have to be found.

    PHANTOM_NUMBERS=1 PHANTOM_ORDER=random phantom/run python tests/phantom/race_finder.py [--schedules 500]
        [--seeds 40] [--output FILE] [WORD...]

WORD chooses faults by their text. Every program and every fault has a process of its own, forked before memwall is
imported. Exit status 1: a schedule of the real code differs, or a fault is not found.
"""

import argparse
import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import torch
from race_table import RACES, Race
from stream_programs import PROGRAMS

ROOT = Path(__file__).resolve().parents[2]
MOST_SECONDS = 120
"""A fault that makes a program run longer than that is found: it hangs."""


def reseed(seed: int) -> None:
    """Begins the random order of work with that number."""
    ctypes.CDLL(os.environ["PHANTOM_LIBRARY"]).phantom_seed(ctypes.c_uint64(seed))


def in_child(work: Callable[[], str]) -> str:
    """Returns what a function said in a fork of this process; how it ended, where it said nothing."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        # What a fault breaks complains at length.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        ctypes.CDLL(None).alarm(MOST_SECONDS)
        try:
            said = work()
        except BaseException as error:
            said = f"error: {type(error).__name__}: {error}".splitlines()[0][:100]
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return found or f"error: ended with status {status}"


def digests(program: str, seeds: range, until: str | None = None) -> str:
    """Returns how many schedules of a program ended with each digest; up to the first other one than `until`."""
    seen: dict[str, int] = {}
    for seed in seeds:
        reseed(seed)
        found = PROGRAMS[program]()
        seen[found] = seen.get(found, 0) + 1
        if until is not None and found != until:
            return f"schedule {seed} differs"
    from phantom import numerics

    if numerics.failures:
        return f"error: not computed: {numerics.failures}"
    return "same" if until is not None else " ".join(f"{digest[:16]}x{count}" for digest, count in seen.items())


def reference(program: str) -> str:
    """Returns the digest of a program whose work is done at once."""

    def run() -> str:
        os.environ["PHANTOM_ORDER"] = "eager"
        ctypes.CDLL(os.environ["PHANTOM_LIBRARY"]).phantom_read_settings_again()
        return PROGRAMS[program]()

    return in_child(run)


def with_fault(race: Race) -> None:
    """Has a file of the product read with a fault in it, in this process; nothing is written."""
    path = str(ROOT / race.path)
    original = SourceFileLoader.get_data

    def get_data(loader: Any, wanted: str) -> bytes:
        data = original(loader, wanted)
        if os.path.realpath(wanted) != path:
            return data
        pieces = data.decode().split(race.text)
        if len(pieces) < race.place + 2:
            raise RuntimeError(f"{race.path} no longer has {race.text!r}: write this fault anew")
        before, after = race.text.join(pieces[: race.place + 1]), race.text.join(pieces[race.place + 1 :])
        return (before + race.faulty + after).encode()

    SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    SourceFileLoader.path_stats = _never_cached  # type: ignore[method-assign,assignment]


def _never_cached(loader: Any, path: str) -> Any:
    raise OSError(path)


def found_by(race: Race, right: str, num_seeds: int) -> str:
    """Returns what found a fault; "same" where nothing did."""

    def run() -> str:
        with_fault(race)
        return digests(race.program, range(num_seeds), until=right)

    return in_child(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=40, help="schedules that may find a fault")
    parser.add_argument("--output", type=Path, help="a file for the result")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    assert not torch.cuda.is_initialized()
    right = {program: reference(program) for program in PROGRAMS}
    num_problems = 0
    schedules: list[dict[str, Any]] = []
    for program, digest in right.items():
        begin = time.monotonic()
        share = -(-options.schedules // len(PROGRAMS))
        said = in_child(
            lambda program=program, digest=digest, share=share: digests(program, range(share), until=digest)
        )
        num_problems += said != "same"
        schedules.append({"program": program, "num_schedules": share, "outcome": said})
        print(f"{program}: {share} schedules: {said} ({time.monotonic() - begin:.0f} s)", flush=True)
    chosen = [race for race in RACES if not options.words or any(word in race.fault for word in options.words)]
    num_found = 0
    faults: list[dict[str, Any]] = []
    for race in chosen:
        said = found_by(race, right[race.program], options.seeds)
        is_found = said != "same" and "write this fault anew" not in said
        num_found += is_found
        faults.append({"fault": race.fault, "path": race.path, "is_found": is_found, "outcome": said})
        print(f"{'found' if is_found else 'NOT FOUND':9} {race.fault} ({said})", flush=True)
    print(f"{num_found} of {len(chosen)} faults are found")
    if options.output is not None:
        versions = {"torch": str(torch.__version__)}
        result = {"tag": "simulated", "versions": versions, "schedules": schedules, "faults": faults}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if num_problems or num_found < len(chosen) else 0


if __name__ == "__main__":
    sys.exit(main())
