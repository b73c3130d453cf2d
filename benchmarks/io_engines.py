"""What io_uring is worth beside threads that read and write: arms in turns on one file, overwriting, with O_DIRECT.

    python benchmarks/io_engines.py [--disk DIR] [--rounds 12]

An arm is a number of threads, and of requests that each has under way. Of the store's threads two are in the kernel at
a time with one each, as in the arm that all others are compared with; a second one of that kind says how far apart two
equal arms are. Writes results/cpu/io_engines.json and its section of README.md.
"""

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import Any

from knob_report import provenance

from memwall.store.backend import SystemBackend
from memwall.store.uring import Ring

OUTPUT = Path(__file__).parent / "results" / "cpu" / "io_engines.json"
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- io-engines: begin -->", "<!-- io-engines: end -->"
FILE_BYTES = 128 << 20
BLOCKS_MIB = (1, 2, 4)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Arm:
    """Who moves the blocks."""

    name: str
    num_threads: int
    num_under_way: int
    """Of each thread."""
    is_uring: bool = True


STORE = Arm("system calls, 2 threads, as the store", 2, 1, is_uring=False)
ARMS = (
    Arm("system calls, 1 thread", 1, 1, is_uring=False),
    STORE,
    Arm("the same again", 2, 1, is_uring=False),
    Arm("system calls, 4 threads", 4, 1, is_uring=False),
    Arm("io_uring, 2 threads, as the store's other engine", 2, 1),
    Arm("io_uring, 1 thread", 1, 1),
    Arm("io_uring, 1 thread, 2 under way", 1, 2),
    Arm("io_uring, 1 thread, 4 under way", 1, 4),
    Arm("io_uring, 1 thread, 8 under way", 1, 8),
    Arm("io_uring, 2 threads, 4 under way each", 2, 4),
)


class File:
    """A file, and as much memory, of which every block has its own: a training step's bytes are not in a cache."""

    def __init__(self, directory: str) -> None:
        self.backend = SystemBackend()
        self.fd = self.backend.open_scratch(directory).fd
        self.backend.reserve(self.fd, 0, FILE_BYTES)
        memory = mmap(-1, FILE_BYTES)
        memory.write(os.urandom(FILE_BYTES))
        self._memory = memoryview(memory)
        self.move_by_calls(range(0, FILE_BYTES, MIB), MIB, is_write=True)  # fresh extents are slower

    def move_by_calls(self, offsets: range, num_bytes: int, *, is_write: bool) -> None:
        """One block after the other."""
        move = self.backend.pwrite if is_write else self.backend.pread
        for offset in offsets:
            check(move(self.fd, self._memory[offset : offset + num_bytes], offset), num_bytes)

    def move_by_ring(self, offsets: range, num_bytes: int, *, is_write: bool, num_under_way: int) -> None:
        """As many blocks under way as are asked for."""
        ring = Ring(num_under_way)
        for index, offset in enumerate(offsets):
            if index >= num_under_way:
                check(ring.take()[1], num_bytes)
            ring.queue(self.fd, self._memory[offset : offset + num_bytes], offset, index, is_write=is_write)
        for _ in range(min(num_under_way, len(offsets))):
            check(ring.take()[1], num_bytes)


def check(moved_bytes: int, wanted_bytes: int) -> None:
    """All blocks must be moved whole."""
    if moved_bytes != wanted_bytes:
        raise OSError(f"{moved_bytes} of {wanted_bytes} bytes were moved")


def timed(file: File, arm: Arm, block_bytes: int, *, is_write: bool) -> tuple[float, float]:
    """Seconds in which an arm moves the whole file, and of processor time meanwhile."""

    def move(thread: int) -> None:
        offsets = range(thread * block_bytes, FILE_BYTES, arm.num_threads * block_bytes)
        if arm.is_uring:
            file.move_by_ring(offsets, block_bytes, is_write=is_write, num_under_way=arm.num_under_way)
        else:
            file.move_by_calls(offsets, block_bytes, is_write=is_write)

    with ThreadPoolExecutor(arm.num_threads) as pool:
        begin, used = time.perf_counter(), processor_seconds()
        list(pool.map(move, range(arm.num_threads)))
        return time.perf_counter() - begin, processor_seconds() - used


def processor_seconds() -> float:
    """That this process has had so far, kernel included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(directory: str, num_rounds: int) -> list[dict[str, Any]]:
    """One row for each block size, direction and arm. Arms take turns, and the next round begins with another."""
    file, rows = File(directory), []
    found = {(size * MIB, is_write, arm): [] for size in BLOCKS_MIB for is_write in (True, False) for arm in ARMS}
    for index in range(num_rounds):
        first = index % len(ARMS)
        for block_bytes, is_write in dict.fromkeys(key[:2] for key in found):
            for arm in ARMS[first:] + ARMS[:first]:
                times = timed(file, arm, block_bytes, is_write=is_write)
                found[block_bytes, is_write, arm].append(times)
    file.backend.close(file.fd)
    for (block_bytes, is_write, arm), times in found.items():
        seconds, used = zip(*times, strict=True)
        stores = (store_seconds for store_seconds, _ in found[block_bytes, is_write, STORE])
        rows.append(
            {
                "arm": arm.name,
                "block_bytes": block_bytes,
                "direction": "write" if is_write else "read",
                "bytes_per_second": statistics.quantiles([FILE_BYTES / value for value in seconds], n=4),
                "speed_ratio_to_store": statistics.quantiles(
                    [store / value for store, value in zip(stores, seconds, strict=True)], n=4
                ),
                "processor_seconds_per_gib": statistics.median(used) * 2**30 / FILE_BYTES,
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Of each arm the median speed, and its ratio to the store's in the same round with quartiles."""
    columns = [(direction, size * MIB) for size in BLOCKS_MIB for direction in ("write", "read")]
    heads = [f"{direction}, {size // MIB} MiB" for direction, size in columns]
    lines = [f"| | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    by_key = {(row["arm"], row["direction"], row["block_bytes"]): row for row in rows}
    for arm in ARMS:
        cells = []
        for column in columns:
            row = by_key[(arm.name, *column)]
            first, median, last = row["speed_ratio_to_store"]
            share = "" if arm is STORE else f", {median:.2f} ({first:.2f}-{last:.2f})"
            cells.append(f"{row['bytes_per_second'][1] / 1e9:.2f} GB/s{share}")
        lines.append(f"| {arm.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Measures, prints and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    rows = measure(options.disk, options.rounds)
    print(table(rows))
    facts = {**provenance(), "schema": "memwall.benchmarks.io-engines/1", "num_rounds": options.rounds, "rows": rows}
    OUTPUT.write_text(json.dumps(facts, indent=1) + "\n")
    before, _, rest = README.read_text().partition(BEGIN)
    README.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
