"""The claim: what a table of rows does in C is worth it: the ring of requests, and the threads.

    python benchmarks/row_pages.py [--rounds 5]

Steps of a table whose rows come from the disk (`embedding_table_run.py`), each part of the C code left out in turn: the
ring (as in a container whose filter refuses io_uring; pages then move one after another), the threads (Python's move
pages). Each run has a process of its own; they take turns. Writes results/cpu/row_pages.json.
"""

import argparse
import ctypes
import json
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knob_report import provenance

OUT = Path(__file__).with_name("results") / "cpu" / "row_pages.json"
ARMS = ("all", "ring", "threads")
"""What is left out; nothing in the first."""
SIZE = ("--rows", "2000000", "--cache", "96MiB", "--fill", "40", "--steps", "200")
# Of an x86-64 or arm64 machine: io_uring_setup has one number on all that Linux has learned of late.
_IO_URING_SETUP = 425
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def refuse_io_uring() -> None:
    """Has the kernel answer io_uring_setup with EPERM from now on, in this process."""
    instructions = ((0x20, 0, 0, 0), (0x15, 0, 1, _IO_URING_SETUP), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))
    text = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    memory = ctypes.create_string_buffer(text, len(text))
    program = _Program(len(instructions), ctypes.addressof(memory))
    library = ctypes.CDLL(None, use_errno=True)
    for call in ((_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (_PR_SET_SECCOMP, _FILTER, ctypes.byref(program))):
        if library.prctl(*call):
            raise OSError(ctypes.get_errno(), "no filter of system calls can be set here")


def run_without(part: str) -> None:
    """One run, in this process."""
    import embedding_table_run

    from memwall.rows import page_swaps

    if part == "ring":
        refuse_io_uring()
    elif part == "threads":
        page_swaps._library = lambda: None
    embedding_table_run.main()


def measured(part: str, folder: str) -> dict[str, Any]:
    """What one run in a process of its own says."""
    command = [sys.executable, "-W", "ignore", __file__, "--without", part, *SIZE, "--disk", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str]) -> int:
    """Returns 0 if every part is worth 5 % of a step, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    folder = tempfile.mkdtemp(prefix="memwall-rows-")
    seconds: dict[str, list[float]] = {part: [] for part in ARMS}
    try:
        for number in range(options.rounds):
            for part in ARMS[number % len(ARMS) :] + ARMS[: number % len(ARMS)]:
                seconds[part].append(measured(part, folder)["step_seconds_quartiles"][1])
                print(f"without {part}: {seconds[part][-1] * 1e3:.1f} ms", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(folder)
    quartiles = {part: statistics.quantiles(values, n=4, method="inclusive") for part, values in seconds.items()}
    ratios = {
        part: statistics.median(mine / whole for mine, whole in zip(seconds[part], seconds["all"], strict=True))
        for part in ARMS[1:]
    }
    result = {
        **provenance(),
        "schema": "memwall.bench-row-pages/1",
        "kind": "cpu-measured",
        "command": f"python benchmarks/row_pages.py --rounds {options.rounds}",
        "size": " ".join(SIZE),
        "median_step_seconds_of_each_run": seconds,
        "quartile_seconds_of_runs": quartiles,
        "time_ratio_without": ratios,
    }
    OUT.write_text(json.dumps(result, indent=1) + "\n")
    for part in ARMS:
        low, middle, high = (1e3 * value for value in quartiles[part])
        name = "all of it" if part == "all" else f"without the {part}, {ratios[part]:.2f} times"
        print(f"{name}: {middle:.1f} ms ({low:.1f}-{high:.1f})")
    return 0 if min(ratios.values()) >= 1.05 else 1


if __name__ == "__main__":
    if "--without" in sys.argv:
        at = sys.argv.index("--without")
        _, chosen = sys.argv[at : at + 2]
        del sys.argv[at : at + 2]
        run_without(chosen)
    else:
        sys.exit(main(sys.argv[1:]))
