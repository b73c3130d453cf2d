"""Fuzzes everything that reads a stranger's file, and records for how long: `make fuzz FUZZ_SECONDS=300`.

    python benchmarks/fuzzing.py [reader ...] [--seconds 300] [--folder .venv/fuzz] [--scratch | --keep]

Each reader runs in tests/fuzz/fuzz.py, under the guidance of its coverage. What a reader does not refuse in one clear
error ends the call with status 1, and lies in FOLDER/crashes. Writes results/cpu/fuzz.json, in which the calls of a
reader add up, since each goes on from the corpus of the last, and its row in docs/guarantees.md. --seconds are those of
the clock, what is recorded are the processor's.

With --keep it fuzzes nothing: the fewest files of FOLDER that reach what all of them reach go into
tests/fuzz/corpus.tar.xz, which the tests read again and the next call begins with.
"""

import argparse
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "cpu" / "fuzz.json"
PAGE = HERE.parent / "docs" / "guarantees.md"
PROGRAM = HERE.parent / "tests" / "fuzz" / "fuzz.py"
sys.path.append(str(PROGRAM.parents[1]))
from fuzz.corpus import keep  # noqa: E402

READERS = (
    *("trace", "trace_file", "plan", "run", "snapshot", "steps", "config", "allocator_settings", "deepspeed"),
    *("diffusers", "dlrover", "next_budget", "checkpoint"),
)
BEGIN, END = "<!-- benchmarks/fuzzing.py writes from here -->", "<!-- to here -->"


def main() -> int:
    """Fuzzes the readers that are named; returns 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", default=READERS, metavar="reader", help=", ".join(READERS))
    parser.add_argument("--seconds", type=int, default=300, help="for each reader")
    parser.add_argument("--folder", type=Path, default=HERE.parent / ".venv" / "fuzz", help="of what was found")
    parser.add_argument("--scratch", action="store_true", help="write no results")
    parser.add_argument("--keep", action="store_true", help="put what FOLDER has into the archive of the tests")
    args = parser.parse_args()
    if unknown := [name for name in args.readers if name not in READERS]:
        parser.error(f"no reader is called {', '.join(unknown)}; expected {', '.join(READERS)}")
    if args.keep:
        for reader in args.readers:
            keep({reader: fewest(reader, args.folder)}, READERS)
        return 0
    is_good = True
    for reader in args.readers:
        found = fuzzed(reader, args.folder, args.seconds)
        print(f"{reader}: {found}", flush=True)
        is_good &= not found["num_failed"]
        if not args.scratch:
            record = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
            write(with_found(record, reader, found))
    return 0 if is_good else 1


def fewest(reader: str, folder: Path) -> list[bytes]:
    """Returns the fewest files of a reader's corpus that reach what all of them reach.

    Raises:
        subprocess.CalledProcessError: a file of the corpus fails.
    """
    with tempfile.TemporaryDirectory() as merged:
        command = [sys.executable, str(PROGRAM), reader, str(folder.resolve()), "-set_cover_merge=1", merged]
        subprocess.run(command, check=True)
        return [path.read_bytes() for path in Path(merged).iterdir()]


def fuzzed(reader: str, folder: Path, seconds: int) -> dict[str, Any]:
    """Fuzzes one reader; returns for how long, and with how many files."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1"]
    command = [sys.executable, str(PROGRAM), reader, str(folder), *options]
    before = processor_seconds()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
    return {
        "seconds": round(processor_seconds() - before),
        "num_files": num_files(done.stdout),
        "num_failed": int(done.returncode != 0),
    }


def processor_seconds() -> float:
    """Returns what the processes that this one has waited for have taken of a processor."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def num_files(shown: str) -> int:
    """Returns how many files libFuzzer says at its end that it has tried; zero where it did not come to it."""
    done = re.search(r"stat::number_of_executed_units: *(\d+)", shown)
    return int(done.group(1)) if done else 0


def with_found(record: Mapping[str, Any], reader: str, found: Mapping[str, int]) -> dict[str, Any]:
    """Returns the record with a call added to what came before it; a failure, and the call after one, begin anew."""
    readers = dict(record.get("readers", {}))
    before = readers.get(reader)
    if before is None or found["num_failed"] or before["num_failed"]:
        readers[reader] = dict(found)
    else:
        readers[reader] = {name: before[name] + value for name, value in found.items()}
    return {"tag": "cpu-measured", "readers": readers}


def table_of(record: Mapping[str, Any]) -> str:
    """Returns what the page shows."""
    readers = record["readers"]
    rows = ["| reader | seconds of a processor | files | outcome |", "| --- | --- | --- | --- |"]
    for name in READERS:
        found = readers.get(name)
        if found is None:
            rows.append(f"| `{name}` | - | - | not fuzzed |")
            continue
        outcome = "a failure" if found["num_failed"] else "each read well, or refused in one clear error"
        rows.append(f"| `{name}` | {found['seconds']:,} | {found['num_files']:,} | {outcome} |")
    return "\n".join(rows)


def write(record: Mapping[str, Any]) -> None:
    """Writes the record, and its row on the page."""
    OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table_of(json.loads(OUTPUT.read_text()))}\n\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    sys.exit(main())
