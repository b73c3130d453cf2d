"""Does harm to training runs, and counts what comes of it: identical, one clear error, or something worse.

    python benchmarks/faults.py allocations|signals|file-systems|clocks|resumes|fits|soak ...
        [--share 1/10] [--seconds N] [--kept FOLDER] [--anew] [--scratch] [--minutes 120]

`allocations` has every allocation of a CPU tensor fail, in the first step, in planned ones, commits and recovery, by
`memwall.fit`, `memwall run --checkpoint` and transformers' Trainer. `signals` sends 300 of them at random instants to
runs that are then resumed. `file-systems` needs root, for small ext4 systems in loop devices. `clocks` has the wall
clock jump, `resumes` goes on with another number of threads, and under other releases of torch where they are here
(make test-torch RELEASE=2.11.0, and 2.14.1). `fits` has 50 sessions in one process, `soak` one long session.

A share takes every tenth instant, say. What came of an instant is kept (in out/faults), so that what a call had no time
for is left to the next one; what ended badly runs again, and with --anew everything does. Writes
results/cpu/faults.json and its table in docs/guarantees.md, from what all calls have found.
"""

import argparse
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from faults_instants import GOOD, Instant, Kept, counted, table

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "cpu" / "faults.json"
PAGE = HERE.parent / "docs" / "guarantees.md"
PARTS = ("allocations", "signals", "file-systems", "clocks", "resumes", "fits", "soak")
_BEGIN, _END = "<!-- benchmarks/faults.py writes from here -->", "<!-- to here -->"


def main() -> int:
    """Runs the parts that are named; returns 1 where anything was worse than one clear error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--share", type=Fraction, default=Fraction(1), help="of the instants of a part")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further instant begins")
    parser.add_argument("--minutes", type=float, default=120.0, help="that the soak takes")
    parser.add_argument("--kept", type=Path, default=HERE.parent / "out" / "faults", help="where instants are kept")
    parser.add_argument("--anew", action="store_true", help="forget what earlier calls have found")
    parser.add_argument("--scratch", action="store_true", help="write no results")
    args = parser.parse_args()
    if {"allocations", "file-systems"} & {*args.parts} and not hasattr(ctypes.CDLL(None), "faults_arm"):
        return _again_with_failing_calls()
    torch.set_num_threads(1)
    is_good = True
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            found = _run_part(part, Path(folder), args)
        print(f"{part}: {json.dumps(found.get('outcomes', found))}", flush=True)
        is_good &= found.get("is_flat", True) and not found.get("bad")
        for each in found.get("bad", ()):
            print(f"  {each}", flush=True)
        if not args.scratch:
            _write(part, found)
    return 0 if is_good else 1


def _run_part(part: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import faults_clocks
    import faults_disks
    import faults_memory
    import faults_repeats
    import faults_runs
    import faults_signals

    if part == "soak":
        return faults_repeats.soak(folder, minutes=args.minutes)
    begin, every = time.monotonic(), max(1, round(1 / args.share))
    path = args.kept / f"{part}.jsonl"
    if args.anew:
        path.unlink(missing_ok=True)
    kept = Kept(path, f"torch {torch.__version__}")
    if part != "fits":
        faults_runs.warm_up()
    instants: dict[str, Callable[[Path], Iterable[Instant]]] = {
        "allocations": faults_memory.allocations,
        "signals": faults_signals.signals,
        "file-systems": faults_disks.file_systems,
        "clocks": faults_clocks.clocks,
        "resumes": _resumes,
        "fits": faults_repeats.fits,
    }
    planned = [*instants[part](folder)]
    left = [instant for instant in planned[::every] if not kept.has(instant.key)]
    random.Random(len(left)).shuffle(left)  # what there is time for is spread over the whole
    for instant in left:
        if time.monotonic() - begin > args.seconds:
            break
        for found in kept.run(instant):
            if found.outcome not in GOOD:
                print(f"{instant.key}: {found}", flush=True)
    return counted(found for instant in planned for found in kept.of(instant))


def _resumes(folder: Path) -> Iterator[Instant]:
    from faults_clocks import resumes
    from faults_releases import releases

    yield from resumes(folder)
    yield from releases(folder)


def _again_with_failing_calls() -> int:
    """Begins anew with the library that has allocations and writes fail, which has to be there before torch is."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults_calls.so"
        source = HERE / "faults_calls.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def _write(part: str, found: dict[str, Any]) -> None:
    """Adds a part to the result file, and writes the table of the page from it."""
    record: dict[str, Any] = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    record |= {"tag": "cpu-measured", "torch": torch.__version__, part.replace("-", "_"): found}
    OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    record = json.loads(OUTPUT.read_text())  # in the order that the file has
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    after = rest.partition(_END)[2]
    PAGE.write_text("\n".join([f"{before}{_BEGIN}", "", *table(record, PARTS), "", f"{_END}{after}"]))


if __name__ == "__main__":
    sys.exit(main())
