"""The phantom device against this machine's GPU, byte by byte: torch's allocator under the same programs on both.

    python benchmarks/gpu_against_phantom.py [--truth FILE] [--seconds N] [--tiny] [--output FILE]

histories: the programs of `allocator_programs.py`, each in a process on the device and in one on a phantom with the
card's memory and context. Every event (bytes, stream, segment and place in it) and every statistic is to be the same.

zoo: cases that `gpu_truth.py` measured (`--truth`), trained on the phantom: bytes allocated and reserved at the peak of
the first and of a steady step. `make phantom` builds the phantom; on one, this compares it with itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from allocator_programs import RUNS
from allocator_record import AllocatorRecord, load_records
from gpu_device import device_name, hardware_here, has_device, slug_of, tag
from knob_report import provenance

ROOT = Path(__file__).parents[1]
STEPS, QUANTITIES = ("first", "steady"), ("allocated_bytes", "reserved_bytes")
_MOST_SECONDS = 120.0
_SAYS = 300
Event = tuple[str, int, int, int, int, int]


def relative(record: AllocatorRecord) -> list[Event]:
    """Returns a record's events without addresses: action, number of the segment, place in it, bytes, stream, pool.

    Segments and streams are numbered in the order in which they come; an `oom` has no place.
    """
    span_bytes = record.total_bytes * 9 // 8
    segments: dict[int, tuple[int, int]] = {}
    streams: dict[int, int] = {}
    found: list[Event] = []

    def holding(address: int) -> tuple[int, int] | None:
        for start in sorted(segments, reverse=True):
            if start <= address < start + segments[start][1]:
                return start, segments[start][0]
        return None

    number = 0
    for action, address, num_bytes, stream, pool in record.events:
        own = streams.setdefault(stream, len(streams))
        if action == "segment_alloc" or (action == "segment_map" and holding(address) is None):
            for start in [start for start in segments if start <= address < start + segments[start][1]]:
                del segments[start]  # given back, and its addresses handed out again
            segments[address] = number, num_bytes if action == "segment_alloc" else span_bytes
            number += 1
        place = None if action == "oom" else holding(address)
        start, segment = (address, -1) if place is None else place
        found.append((action, segment, address - start, num_bytes, own, pool))
        if action == "segment_free":
            segments.pop(address, None)
    return found


def difference(device: AllocatorRecord, phantom: AllocatorRecord) -> str | None:
    """Returns where two records of one program first differ; None: nowhere."""
    pairs = zip(relative(device), relative(phantom), strict=False)
    for number, (there, here) in enumerate(pairs):
        if there != here:
            return f"event {number}: device {there}, phantom {here}"
    if len(device.events) != len(phantom.events):
        return f"device {len(device.events)} events, phantom {len(phantom.events)}"
    for name in sorted({*device.statistics, *phantom.statistics}):
        there_count, here_count = device.statistics.get(name), phantom.statistics.get(name)
        if there_count != here_count:
            return f"{name}: device {there_count}, phantom {here_count}"
    return None


class Both:
    """Runs programs of this folder on the device, or on a phantom of the same card.

    Args:
        card: the card's entry in hardware.toml.
        total_bytes: all memory that it has.
        context_bytes: what a process takes of it beside torch's allocator.
    """

    def __init__(self, card: str, total_bytes: int, context_bytes: int) -> None:
        self._settings = {
            "PHANTOM_CARD": card,
            "PHANTOM_MEMORY_BYTES": str(total_bytes),
            "PHANTOM_CONTEXT_BYTES": str(context_bytes),
            "PHANTOM_ORDER": "timed",
        }

    def run(self, arguments: Sequence[str], settings: str, *, on_phantom: bool) -> str:
        """Returns what a program printed.

        Raises:
            RuntimeError: it failed, or took too long.
        """
        command = [str(ROOT / "phantom" / "run"), "python"] if on_phantom else [sys.executable]
        own = self._settings if on_phantom else {}
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": settings, "PYTORCH_ALLOC_CONF": settings}
        try:
            done = subprocess.run(
                [*command, str(Path(__file__).parent / arguments[0]), *arguments[1:]],
                env={**os.environ, **own, **allocator},
                input='{"used_bytes": 0}\n',
                capture_output=True,
                text=True,
                timeout=_MOST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{' '.join(arguments)}: not done after {_MOST_SECONDS:.0f} s") from None
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: status {done.returncode}: {done.stderr.strip()[-_SAYS:]}")
        return done.stdout


def history_row(both: Both, program: str, settings: str) -> dict[str, Any]:
    """Returns how the histories of a program on the two differ."""
    records = []
    with tempfile.TemporaryDirectory() as name:
        for place in ("device", "phantom"):
            folder = Path(name) / place
            arguments = ("gpu_record_case.py", program, str(folder), str(folder / "snapshots"))
            both.run(arguments, settings, on_phantom=place == "phantom")
            (record,) = load_records(folder).values()
            records.append(record)
    return {
        "program": program,
        "settings": settings,
        "num_events": len(records[0].events),
        "difference": difference(*records),
    }


def zoo_row(both: Both, measured: dict[str, Any]) -> dict[str, Any]:
    """Returns a case's peaks as the device counted them and as the phantom does."""
    case = (measured["family"], measured["precision"], measured["optimizer"])
    found = json.loads(both.run(("gpu_truth_case.py", *case), "", on_phantom=True))["measured"]
    counted = {step: measured["measured"][step] for step in STEPS}
    return {
        "case": "/".join(case),
        "device_counts": counted,
        "phantom_counts": {step: found[step] for step in STEPS},
        "worst_error": max(
            (found[step][name] / counted[step][name] - 1 for step in STEPS for name in QUANTITIES), key=abs
        ),
    }


def has_phantom() -> str:
    """Builds a phantom where none is built; returns why that cannot be, or nothing."""
    folder = Path(os.environ.get("PHANTOM_ENV", ROOT / ".venv" / "phantom"))
    if (folder / "device" / "libphantom.so").exists():
        return ""
    command = [sys.executable, str(ROOT / "phantom" / "environment.py"), str(folder)]
    version = str(torch.__version__).partition("+")[0]
    done = subprocess.run([*command, "--torch", f"torch=={version}"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"the phantom cannot be built: {done.stderr.strip()[-_SAYS:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, help="a result of gpu_truth.py")
    parser.add_argument("--seconds", type=float, default=300.0, help="begin nothing further after so long")
    parser.add_argument("--tiny", action="store_true", help="one program, one case")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not has_device("gpu_against_phantom"):
        return 2
    stop = time.monotonic() + options.seconds
    output = options.output or Path(__file__).parent / "results" / slug_of(device_name()) / "against_phantom.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    both = Both(hardware_here().name, total_bytes, total_bytes - free_bytes)
    truth = json.loads(options.truth.read_text())["rows"] if options.truth and options.truth.exists() else []
    runs, zoo = (RUNS[3:4], truth[:1]) if options.tiny else (RUNS, truth)
    left: list[Any] = [*runs, *zoo]
    document: dict[str, Any] = {
        **provenance(),
        "schema": "memwall.gpu-against-phantom/1",
        "tag": tag(),
        "device": device_name(),
        "histories": [],
        "zoo": [],
        "missed": [],
        "failures": [why] if (why := has_phantom()) else [],
    }
    while left and not why and time.monotonic() < stop:
        wanted = left.pop(0)
        try:
            if isinstance(wanted, dict):
                document["zoo"].append(row := zoo_row(both, wanted))
                if row["worst_error"]:
                    document["missed"].append(f"{row['case']}: bytes at a peak differ by {row['worst_error']:+.2%}")
            else:
                document["histories"].append(row := history_row(both, *wanted))
                if row["difference"]:
                    document["missed"].append(f"{' '.join(wanted).strip()}: {row['difference']}")
            print(json.dumps(row), flush=True)
        except (RuntimeError, KeyError, ValueError) as error:
            document["failures"].append(str(error))
            print(error, file=sys.stderr, flush=True)
        _write(output, document, left)
    _write(output, document, left)
    wrong = document["failures"] + document["missed"]
    print(f"wrote {output}; {'; '.join(wrong) or 'the phantom does what the device does'}")
    return 1 if wrong else 0


def _write(output: Path, document: dict[str, Any], left: Sequence[Any]) -> None:
    """Writes the result so far, and what it does not have."""
    document["not_reached"] = [
        f"{each['family']}/{each['precision']}/{each['optimizer']}"
        if isinstance(each, dict)
        else " ".join(each).strip()
        for each in left
    ]
    output.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
