"""Fuzzes everything that reads a stranger's file, and records for how long: `make fuzz FUZZ_SECONDS=300`.

    python benchmarks/fuzzing.py [reader ...] [--seconds 300] [--folder .venv/fuzz] [--scratch]

Each reader runs in tests/fuzz/fuzz.py, under the guidance of its coverage. What a reader does not refuse in one clear
error ends the call with status 1, and lies in FOLDER/crashes. Writes results/cpu/fuzz.json, where a reader has the last
call that fuzzed it for as long as any other, and its row in docs/guarantees.md.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "cpu" / "fuzz.json"
PAGE = HERE.parent / "docs" / "guarantees.md"
PROGRAM = HERE.parent / "tests" / "fuzz" / "fuzz.py"
READERS = ("trace", "trace_file", "plan", "run", "snapshot", "steps", "config", "allocator_settings")
BEGIN, END = "<!-- benchmarks/fuzzing.py writes from here -->", "<!-- to here -->"


def main() -> int:
    """Fuzzes the readers that are named; returns 1 where one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readers", nargs="*", default=READERS, metavar="reader", help=", ".join(READERS))
    parser.add_argument("--seconds", type=int, default=300, help="for each reader")
    parser.add_argument("--folder", type=Path, default=HERE.parent / ".venv" / "fuzz", help="of what was found")
    parser.add_argument("--scratch", action="store_true", help="write no results")
    args = parser.parse_args()
    if unknown := [name for name in args.readers if name not in READERS]:
        parser.error(f"no reader is called {', '.join(unknown)}; expected {', '.join(READERS)}")
    is_good = True
    for reader in args.readers:
        found = fuzzed(reader, args.folder, args.seconds)
        print(f"{reader}: {found}", flush=True)
        is_good &= not found["num_failed"]
        if not args.scratch:
            record = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
            write(with_found(record, reader, found))
    return 0 if is_good else 1


def fuzzed(reader: str, folder: Path, seconds: int) -> dict[str, Any]:
    """Fuzzes one reader; returns for how long, and with how many files."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    options = [f"-max_total_time={seconds}", "-print_final_stats=1"]
    command = [sys.executable, str(PROGRAM), reader, str(folder), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
    return read_statistics(done.stdout) | {"num_failed": int(done.returncode != 0)}


def read_statistics(shown: str) -> dict[str, int]:
    """Returns what libFuzzer has shown at its end; zeros where it did not come to it."""
    done = re.search(r"Done (\d+) runs in (\d+) second", shown)
    return {"seconds": int(done.group(2)) if done else 0, "num_files": int(done.group(1)) if done else 0}


def with_found(record: Mapping[str, Any], reader: str, found: Mapping[str, int]) -> dict[str, Any]:
    """Returns the record with a call, in place of one that did not last longer or of one that failed where this did."""
    readers = dict(record.get("readers", {}))
    before = readers.get(reader)
    if before is None or found["num_failed"] or before["num_failed"] or found["seconds"] >= before["seconds"]:
        readers[reader] = dict(found)
    return {"tag": "cpu-measured", "readers": readers}


def table_of(record: Mapping[str, Any]) -> str:
    """Returns what the page shows."""
    readers = record["readers"]
    rows = ["| reader | seconds | files | outcome |", "| --- | --- | --- | --- |"]
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
