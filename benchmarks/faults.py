"""Does harm to training runs, and counts what comes of it: identical, one clear error, or something worse.

    python benchmarks/faults.py allocations|signals|file-systems|clocks|threads|fits|soak ...
        [--share 1/10] [--seconds N] [--minutes 120]

`allocations` has every allocation of a CPU tensor fail, in the first step, in planned ones, commits and recovery, by
`memwall.fit`, `memwall run --checkpoint` and transformers' Trainer. `signals` sends 300 of them at random instants to
runs that are then resumed. `file-systems` needs root, for small ext4 systems in loop devices. `fits` has 50 sessions in
one process, `soak` one long session. A share takes every tenth instant, say; what there was no time for is counted as
not run. Writes results/cpu/faults.json, and of each part that ran its rows in docs/guarantees.md.
"""

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "cpu" / "faults.json"
PAGE = HERE.parent / "docs" / "guarantees.md"
PARTS = ("allocations", "signals", "file-systems", "clocks", "threads", "fits", "soak")
GOOD = ("identical", "one clear error", "readable", "nothing committed", "over before", "flat", "goes on", "not run")
_BEGIN, _END = "<!-- benchmarks/faults.py writes from here -->", "<!-- to here -->"


def main() -> int:
    """Runs the parts that are named; returns 1 where anything was worse than one clear error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--share", type=Fraction, default=Fraction(1), help="of the instants of a part")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further instant begins")
    parser.add_argument("--minutes", type=float, default=120.0, help="that the soak takes")
    parser.add_argument("--scratch", action="store_true", help="write no results")
    args = parser.parse_args()
    if "allocations" in args.parts and not hasattr(ctypes.CDLL(None), "faults_arm"):
        return _again_with_faulty_allocator()
    torch.set_num_threads(1)
    record: dict[str, Any] = {"tag": "cpu-measured", "torch": torch.__version__}
    is_good = True
    for part in args.parts:
        with tempfile.TemporaryDirectory(prefix="faults-") as folder:
            found = _run_part(part, Path(folder), args)
        record[part.replace("-", "_")] = found
        print(f"{part}: {json.dumps(found.get('outcomes', found))}", flush=True)
        is_good &= found.get("is_flat", True) and not found.get("bad")
        for each in found.get("bad", ()):
            print(f"  {each}", flush=True)
    if not args.scratch:
        record = (json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}) | record  # parts may run at one time
        OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        _write_page(record)
    return 0 if is_good else 1


def _run_part(part: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    import faults_disks
    import faults_memory
    import faults_repeats
    import faults_signals

    begin = time.monotonic()

    def has_time() -> bool:
        return time.monotonic() - begin < args.seconds

    every = max(1, round(1 / args.share))
    if part == "soak":
        return faults_repeats.soak(folder, minutes=args.minutes)
    rows: dict[str, Callable[[], Iterator[tuple[str, str, str]]]] = {
        "allocations": lambda: faults_memory.allocations(folder, chosen=lambda n: n % every == 0 and has_time()),
        "signals": lambda: faults_signals.signals(folder, num_signals=round(300 * args.share), until=has_time),
        "file-systems": lambda: faults_disks.file_systems(folder, share=float(args.share)),
        "clocks": lambda: faults_disks.clocks(folder),
        "threads": lambda: faults_disks.threads(folder),
        "fits": lambda: faults_repeats.fits(folder),
    }
    return _counted(rows[part](), begin)


def _counted(rows: Iterable[tuple[str, str, str]], begin: float) -> dict[str, Any]:
    counts: Counter[tuple[str, str]] = Counter()
    bad = []
    for name, outcome, said in rows:
        counts[name, outcome] += 1
        if outcome not in GOOD:
            bad.append({"of": name, "outcome": outcome, "said": said[-800:]})
    names = dict.fromkeys(name for name, _ in counts)
    outcomes = {
        name: {f"num_{outcome.replace(' ', '_')}": counts[name, outcome] for of, outcome in counts if of == name}
        for name in names
    }
    num_run = sum(count for (_, outcome), count in counts.items() if outcome != "not run")
    return {
        "outcomes": outcomes,
        "num_planned": sum(counts.values()),
        "num_run": num_run,
        "bad": bad,
        "part_seconds": round(time.monotonic() - begin),
    }


def _again_with_faulty_allocator() -> int:
    """Begins anew with the library that has allocations fail, which has to be there before torch is."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "faults_allocator.so"
        source = HERE / "faults_allocator.c"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        environment = os.environ | {"LD_PRELOAD": str(library), "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode


def _write_page(record: dict[str, Any]) -> None:
    """Writes the table of what was found."""
    lines = ["", "| harm | instants run, of those planned | outcomes |", "| --- | --- | --- |"]
    for part in PARTS:
        found = record.get(part.replace("-", "_"))
        if found is None:
            continue
        if part == "soak":
            grown = found["grown"]
            lines.append(
                f"| soak, {found['minutes_of_60_seconds']:g} minutes | {found['num_steps']:,} steps | grown by "
                f"{grown['resident_bytes'] / 2**20:.1f} MiB, {grown['num_handles']} handles, {grown['num_threads']} "
                f"threads, {grown['disk_bytes'] / 2**20:.1f} MiB of disk |"
            )
            continue
        for name, outcomes in found["outcomes"].items():
            done = {each[4:].replace("_", " "): count for each, count in outcomes.items() if each != "num_not_run"}
            planned = sum(outcomes.values())
            said = ", ".join(f"{count} {outcome}" for outcome, count in done.items()) or "-"
            lines.append(f"| {part}: {name} | {sum(done.values())} of {planned} | {said} |")
    text = PAGE.read_text()
    before, after = text.split(_BEGIN)[0], text.split(_END)[1]
    PAGE.write_text("\n".join([f"{before}{_BEGIN}", *lines, "", f"{_END}{after}"]))


if __name__ == "__main__":
    sys.exit(main())
