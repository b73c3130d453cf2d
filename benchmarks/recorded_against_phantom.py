"""Compares what a GPU did once with what the phantom device does: no GPU is needed any more.

    PHANTOM_ENV=FOLDER phantom/run python benchmarks/recorded_against_phantom.py [DEVICE]

Reads results/DEVICE/prediction.json and tests/golden/DEVICE, which `gpu_truth.py` wrote, runs the same on a phantom
of that card, with cuDNN's own choice of kernels, and writes results/DEVICE/recorded_against_phantom.json. torch must be
that release: `phantom/environment.py FOLDER --torch torch==2.11.0`. Counted are the figures of torch on both
sides; those of the phantom are simulated. Exit status 1: a history has other events, or other sizes.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from allocator_record import PEAKS, AllocatorRecord, load_records
from gpu_against_phantom import Both, difference
from knob_report import provenance

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "tests" / "golden"
DEVICE = "nvidia-h100-80gb-hbm3"
QUANTITIES = ("requested_bytes", "allocated_bytes", "reserved_bytes")


def history_row(both: Both, device: AllocatorRecord) -> dict[str, Any]:
    """Returns how a program's history on the phantom differs from the recorded one: in events, peaks, and places."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "records"
        arguments = ("gpu_record_case.py", device.program, str(folder), str(Path(name) / "snapshots"))
        both.run(arguments, device.settings, on_phantom=True)
        (phantom,) = load_records(folder).values()
    pairs = zip(_sizes(device), _sizes(phantom), strict=False)
    return {
        "program": device.program,
        "settings": device.settings,
        "num_events": len(device.events),
        "num_other_events": sum(one != other for one, other in pairs) + abs(len(device.events) - len(phantom.events)),
        "other_peaks": {
            key: [device.statistics[f"{key}.all.peak"], phantom.statistics[f"{key}.all.peak"]]
            for key in PEAKS
            if device.statistics[f"{key}.all.peak"] != phantom.statistics[f"{key}.all.peak"]
        },
        "first_difference_with_places": difference(device, phantom),
    }


def _sizes(record: AllocatorRecord) -> list[tuple[str, int]]:
    """Returns what is asked for and given back, without the addresses, which the driver chooses."""
    return [(action, num_bytes) for action, _, num_bytes, _, _ in record.events]


def case_row(both: Both, row: dict[str, Any], hardware: str) -> dict[str, Any]:
    """Returns a case's steady peaks on the device, on the phantom, and as the translation foresees them now."""
    case = (row["family"], row["precision"], row["optimizer"])
    found = json.loads(both.run(("gpu_truth_case.py", *case, "--device", hardware), "", on_phantom=True))
    return {
        "case": "/".join(case),
        "device_bytes": {name: row["measured"][name] for name in QUANTITIES},
        "phantom_bytes": {name: found["measured"][name] for name in QUANTITIES},
        "translated_bytes": {name: found["predicted"][name] for name in QUANTITIES[1:]},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default=DEVICE)
    options = parser.parse_args()
    os.environ["PHANTOM_CUDNN"] = "real"
    folder = HERE / "results" / options.device
    truth = json.loads((folder / "prediction.json").read_text())
    records = load_records(GOLDEN / options.device)
    both = Both(truth["hardware"], next(iter(records.values())).total_bytes, truth["context_bytes"][1])
    document: dict[str, Any] = {
        **provenance(),
        "schema": "memwall.recorded-against-phantom/1",
        "tag": "simulated",
        "device": truth["device"],
        "torch": str(torch.__version__),
        "histories": [history_row(both, record) for record in records.values()],
        "zoo": [case_row(both, row, truth["hardware"]) for row in truth["rows"]],
    }
    for place in ("phantom", "translated"):
        for name in QUANTITIES[1:]:
            errors = [abs(row[f"{place}_bytes"][name] / row["device_bytes"][name] - 1) for row in document["zoo"]]
            document[f"{place}_{name}_error"] = {"median": statistics.median(errors), "worst": max(errors)}
            print(f"{place} {name}: median {statistics.median(errors):.2%}, worst {max(errors):.1%}")
    (folder / "recorded_against_phantom.json").write_text(json.dumps(document, indent=1) + "\n")
    for row in document["histories"]:
        print(row)
    return int(any(row["num_other_events"] or row["other_peaks"] for row in document["histories"]))


if __name__ == "__main__":
    sys.exit(main())
