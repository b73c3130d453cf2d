"""The claim: a transfer of the store is as fast as the disk, costs little of a core, and moves no byte too many.

    python benchmarks/store_speed.py [--rounds 12] [--disk DIR]
    python benchmarks/store_speed.py --quick          # small transfers, two rounds; nothing is written

One transfer out and one back of 64 and of 512 MiB, as a bucket of state or a large tensor makes it: with the store's
blocks, threads and checksums. In turns with it the same memory goes to a file with O_DIRECT and back without memwall,
by as many threads (`raw_disk.py`), and once more: how far apart two equal arms are. Seconds of the processor are those
of all threads of the process (getrusage(2)), bytes the kernel's (/proc/self/io), which both count what the store did
alone. Writes results/cpu/store_speed.json.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from mmap import MADV_HUGEPAGE, PAGESIZE, mmap
from pathlib import Path
from typing import Any

from knob_report import provenance
from raw_disk import RawDisk, io_bytes

from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

OUTPUT = Path(__file__).parent / "results" / "cpu" / "store_speed.json"
MIB = 1 << 20
SIZES_MIB = (64, 512)
MIN_SHARE, MAX_CPU_SECONDS_PER_GIB = 0.9, 0.15
_HUGE_PAGE_BYTES = 2 * MIB


def huge_memory(num_bytes: int) -> memoryview:
    """Random bytes in huge pages, as tensors lie in memwall's heap."""
    region = mmap(-1, num_bytes + _HUGE_PAGE_BYTES)
    region.madvise(MADV_HUGEPAGE)
    view = memoryview(region)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(region)) % _HUGE_PAGE_BYTES
    memory = view[start : start + num_bytes]
    for offset in range(0, num_bytes, _HUGE_PAGE_BYTES):
        memory[offset : offset + _HUGE_PAGE_BYTES] = os.urandom(_HUGE_PAGE_BYTES)
    return memory


def cpu_seconds() -> float:
    """That all threads of this process have had so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(size_mib: int, num_rounds: int, directory: str) -> dict[str, Any]:
    """Rounds of: the disk alone, the store, the disk alone; the store first in every other one."""
    num_bytes = size_mib * MIB
    memory = huge_memory(num_bytes)
    raw = RawDisk(directory, file_bytes=num_bytes, memory=memory)
    rows: list[dict[str, float]] = []
    with TransferPool(ScratchFile(directory)) as pool:
        slot = pool.scratch.allocate(num_bytes)

        def seconds_per_byte() -> tuple[float, float]:
            times = []
            for move in (pool.write, pool.read):
                begin = time.perf_counter()
                move(slot, memory).wait()
                times.append((time.perf_counter() - begin) / num_bytes)
            return times[0], times[1]

        seconds_per_byte()  # first writes into fresh extents are slower
        for number in range(num_rounds):
            row: dict[str, float] = {}
            arms: list[tuple[str, Callable[[], tuple[float, float]]]] = [
                ("raw", raw.seconds_per_byte),
                ("store", seconds_per_byte),
                ("again", raw.seconds_per_byte),
            ]
            for name, arm in arms if number % 2 == 0 else arms[::-1]:
                before, cpu, issued = io_bytes(), cpu_seconds(), pool.bytes_read + pool.bytes_written
                row[f"{name}_write"], row[f"{name}_read"] = arm()
                row[f"{name}_cpu"] = (cpu_seconds() - cpu) / (2 * num_bytes)
                if name == "store":
                    row["issued_bytes"] = pool.bytes_read + pool.bytes_written - issued
                    row["kernel_bytes"] = sum(now - then for now, then in zip(io_bytes(), before, strict=True))
            rows.append(row)
    raw.close()

    def ratios(of: str, to: str) -> list[float]:
        return quartiles([row[to] / row[of] for row in rows])

    return {
        "transfer_bytes": num_bytes,
        "num_rounds": num_rounds,
        "write_bytes_per_second": 1 / statistics.median(row["store_write"] for row in rows),
        "read_bytes_per_second": 1 / statistics.median(row["store_read"] for row in rows),
        "write_share": ratios("store_write", "raw_write"),
        "read_share": ratios("store_read", "raw_read"),
        "write_share_of_the_disk_again": ratios("again_write", "raw_write"),
        "read_share_of_the_disk_again": ratios("again_read", "raw_read"),
        "cpu_seconds_per_gib": quartiles([row["store_cpu"] * 2**30 for row in rows]),
        "cpu_seconds_per_gib_of_the_disk": quartiles([row["raw_cpu"] * 2**30 for row in rows]),
        "own_cpu_seconds_per_gib": quartiles([(row["store_cpu"] - row["raw_cpu"]) * 2**30 for row in rows]),
        "issued_bytes": sum(row["issued_bytes"] for row in rows),
        "kernel_bytes": sum(row["kernel_bytes"] for row in rows),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def holds(cell: dict[str, Any]) -> bool:
    """Whether one size is moved as fast, as cheaply and as exactly as claimed.

    The processor's time is the engine's own: what the kernel takes to move blocks is the disk's. A page in a round may
    be the file system's.
    """
    is_fast = min(cell["write_share"][1], cell["read_share"][1]) >= MIN_SHARE
    is_cheap = cell["own_cpu_seconds_per_gib"][1] <= MAX_CPU_SECONDS_PER_GIB
    is_exact = 0 <= cell["kernel_bytes"] - cell["issued_bytes"] <= PAGESIZE * cell["num_rounds"]
    return is_fast and is_cheap and is_exact


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="transfers of the store, beside the disk alone")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="small transfers, two rounds; nothing is written")
    options = parser.parse_args(arguments)
    sizes, num_rounds = ((16,), 2) if options.quick else (SIZES_MIB, options.rounds)
    cells = []
    for size_mib in sizes:
        cell = measure(size_mib, num_rounds, options.disk)
        cell["holds"] = holds(cell)
        cells.append(cell)
        for way in ("write", "read"):
            low, middle, high = cell[f"{way}_share"]
            again = cell[f"{way}_share_of_the_disk_again"][1]
            print(
                f"{size_mib} MiB, {way}: {cell[f'{way}_bytes_per_second'] / 1e9:.2f} GB/s, {middle:.0%} "
                f"({low:.0%}-{high:.0%}) of the disk's, which again is {again:.0%}"
            )
        print(
            f"{size_mib} MiB: {cell['cpu_seconds_per_gib'][1]:.3f} s of the processor a GiB, the disk alone "
            f"{cell['cpu_seconds_per_gib_of_the_disk'][1]:.3f}; {cell['kernel_bytes'] - cell['issued_bytes']:+,.0f} "
            "bytes beside those that were asked for"
        )
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.store-speed/1", "cells": cells}
        OUTPUT.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if options.quick or all(cell["holds"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
