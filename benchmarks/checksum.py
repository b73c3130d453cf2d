"""How fast a block's checksum is, beside zlib's: both give the same number.

    python benchmarks/checksum.py

Blocks of 2 MiB, in turns, best of five; writes results/cpu/checksum.json.
"""

import json
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from knob_report import provenance

from memwall.store.checksum import crc32
from memwall.store.transfer import DEFAULT_BLOCK_BYTES

OUTPUT = Path(__file__).parent / "results" / "cpu" / "checksum.json"
_NUM_BLOCKS = 32


def seconds(function: Callable[[memoryview], int], data: memoryview) -> float:
    """For all blocks once."""
    begin = time.perf_counter()
    for start in range(0, len(data), DEFAULT_BLOCK_BYTES):
        function(data[start : start + DEFAULT_BLOCK_BYTES])
    return time.perf_counter() - begin


def main() -> int:
    """Measures and writes."""
    data = memoryview(bytearray(os.urandom(_NUM_BLOCKS * DEFAULT_BLOCK_BYTES)))
    functions: dict[str, Callable[[memoryview], int]] = {"zlib": zlib.crc32, "memwall": crc32}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(5):
        for name, function in functions.items():
            best[name] = min(best[name], seconds(function, data))
    speeds = {name: len(data) / value for name, value in best.items()}
    print(", ".join(f"{name}: {speed / 1e9:.1f} GB/s" for name, speed in speeds.items()))
    facts = {**provenance(), "schema": "memwall.benchmarks.checksum/1", "bytes_per_second": speeds}
    OUTPUT.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
