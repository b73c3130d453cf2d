"""Compares forecasts for a card with what torch's own allocator counts on the phantom one. All simulated.

    PHANTOM_CARD=NAME phantom/run python benchmarks/phantom_truth.py NAME [--seconds 600] [--every N] [CASE ...]

Cases are those of gpu_truth.py, in its order, each in a forked process: forecast, then trained on the device; CASE is
family/precision/optimizer. Rows of earlier calls for the same zoo are kept, so that a second call goes on. The result
is benchmarks/results/simulated/phantom_truth.json, with a table for each card: errors of allocated and reserved bytes
in the first and in a steady step, against the goals, and each row that deviates by more than 0.1 %.

On the phantom torch's dispatcher, kernels' host code and caching allocator are real; cuDNN's workspaces are 0 bytes.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from fake_steps import record_fake
from gpu_truth import Case, cases
from gpu_truth_case import SAMPLES_FACTOR, measured
from knob_report import provenance
from prediction_zoo import FAMILIES, Precision, workload, zoo_sha256

from memwall.machine.hardware import Hardware, hardware_named
from memwall.patches import Patches
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.roofline import Roofline

OUTPUT = Path(__file__).parent / "results/simulated/phantom_truth.json"
GOALS = {"allocated_bytes": {"median": 0.001, "worst": 0.01}, "reserved_bytes": {"median": 0.005, "worst": 0.03}}
STEPS = ("first", "steady")
_NOTABLE = 0.001
Row = dict[str, Any]


def foreseen(family: str, precision: Precision, optimizer: str, hardware: Hardware) -> dict[str, dict[str, int]]:
    """Allocated and reserved bytes at the peak of the first step and of steady ones."""
    chosen = FAMILIES[family]
    recording = recording_for(hardware)
    trace = record_fake(
        workload(family, optimizer, precision, SAMPLES_FACTOR * chosen.num_samples),
        target="cuda",
        seconds_of=Roofline(hardware),
        mask_share=chosen.mask_share,
        workspaces=recording.workspaces,
        choices=recording.choices(),
    )
    profile, _ = profile_for(str(torch.__version__))
    peaks = step_peaks(translated(trace, hardware, autocast=recording.autocast).steps, profile)
    assert peaks is not None, "a device without end is never full"
    return {
        name: {"allocated_bytes": peak.allocated_bytes, "reserved_bytes": peak.reserved_bytes}
        for name, peak in zip(STEPS, peaks, strict=False)
    }


@contextmanager
def as_with_values() -> Iterator[None]:
    """Has transformers hear what a device would tell it: that positions do not restart within a row.

    Kernels do nothing on the phantom device, and all positions read as 0. What the question allocates is allocated.
    """
    from transformers import masking_utils

    def asked(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)

    with Patches("trains on a device whose kernels do nothing") as patches:
        patches.wrap(masking_utils, "find_packed_sequence_indices", asked)
        yield


def row_of(case: Case, hardware: Hardware) -> Row:
    """Runs one case in a forked process, before which CUDA has not been touched."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        row: Row = {"device": hardware.name, "case": "/".join(case)}
        try:
            row["foreseen"] = foreseen(*case, hardware)  # type: ignore[arg-type]
            with as_with_values():
                found = measured(*case, used_bytes=0)  # type: ignore[arg-type]
            row["counted"] = {step: found[step] for step in STEPS}
        except Exception:
            row["failure"] = traceback.format_exc().strip().splitlines()[-1][:300]
        os.write(writer, json.dumps(row).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return {"device": hardware.name, "case": "/".join(case), "failure": f"ended with status {status}"}
    found: Row = json.loads(text)
    return found


def error(row: Row, step: str, quantity: str) -> float:
    return float(row["foreseen"][step][quantity] / row["counted"][step][quantity] - 1)


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """Median and worst errors of a card's rows, what of them misses its goal, and rows to be explained."""
    good = [row for row in rows if "failure" not in row]
    found: dict[str, Any] = {"num_rows": len(good), "failed": {r["case"]: r["failure"] for r in rows if "failure" in r}}
    missed = []
    for step in STEPS if good else ():
        for quantity, goals in GOALS.items():
            errors = [error(row, step, quantity) for row in good]
            figures = {"median": median(map(abs, errors)), "worst": max(errors, key=abs)}
            found[f"{step} {quantity}"] = figures
            missed += [f"{step} {quantity} {name}" for name, most in goals.items() if not abs(figures[name]) <= most]
    found["missed"] = missed if good else ["every case failed"]
    found["deviating"] = {
        row["case"]: {
            f"{s} {q}": round(error(row, s, q), 5) for s in STEPS for q in GOALS if abs(error(row, s, q)) > _NOTABLE
        }
        for row in good
        if any(abs(error(row, s, q)) > _NOTABLE for s in STEPS for q in GOALS)
    }
    return found


def line(device: str, figures: dict[str, Any]) -> str:
    """Returns a card's row of the published table, in Markdown: median and worst errors, first and steady step."""
    cells = []
    for quantity in GOALS:
        for step in STEPS:
            found = figures[f"{step} {quantity}"]
            cells.append(f"{100 * found['median']:.3f}, {100 * abs(found['worst']):.2f} %")
    return f"| {device} | {figures['num_rows']} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", type=hardware_named)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--every", type=int, default=1, help="take every n-th case only")
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.monotonic()
    old = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
    rows: list[Row] = old.get("rows", []) if old.get("zoo_sha256") == zoo_sha256() else []
    chosen = [tuple(case.split("/")) for case in options.cases] or list(cases())[:: options.every]
    rows = [
        r for r in rows if not (options.cases and r["device"] == options.device.name and r["case"] in options.cases)
    ]
    done = {(row["device"], row["case"]) for row in rows}
    for case in chosen:
        if (options.device.name, "/".join(case)) in done:
            continue
        if time.monotonic() - begin > options.seconds:
            break
        rows.append(row_of(case, options.device))  # type: ignore[arg-type]
        print(json.dumps(rows[-1]), file=sys.stderr)
    devices = sorted({row["device"] for row in rows})
    result = {
        **provenance(),
        "schema": "memwall.benchmarks.phantom_truth/1",
        "tag": "simulated",
        "zoo_sha256": zoo_sha256(),
        "tables": {device: table([row for row in rows if row["device"] == device]) for device in devices},
        "rows": sorted(rows, key=lambda row: (row["device"], row["case"])),
    }
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["tables"], indent=1))


if __name__ == "__main__":
    main()
