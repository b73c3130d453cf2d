"""Others' measured runs by both routes: the phantom's forecast beside the translation's. Simulated against external.

    phantom/run python benchmarks/routes_external.py CSV [--seconds 1200]

CSV is the file of `prediction.py --runs`; timm is to be installed as there. Of each model one run is asked for, of the
batch nearest to 32, since each takes some seconds. Rows of earlier calls are kept, and families take turns, so that a
call that ends early has a sample of all. The allocator is that of torch 2.11, the oldest that memwall knows; with which
release the runs were measured is not recorded. Writes results/simulated/routes_external.json.
"""

import argparse
import json
import os
import time
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from knob_report import provenance
from phantom_truth import forked
from prediction_metrics import linear_arm, summary
from prediction_runs import (
    ALLOCATOR,
    DEVICE,
    Run,
    file_sha256,
    import_timm,
    read_runs,
    reserved_bytes_of,
    translated_trace,
    workload_of,
)

from memwall.integrations.phantom.recording import record_on_phantom
from memwall.machine.hardware import hardware_named
from memwall.predict.device import convolution_bytes, margin_bytes
from memwall.trace.records import Trace

OUTPUT = Path(__file__).parent / "results" / "simulated" / "routes_external.json"
ROUTES = ("translate", "phantom")
_MIB = 1 << 20
_BATCH = 32
_ROWS_BETWEEN = 10


def asked(runs: Sequence[Run]) -> list[Run]:
    """Returns one run of each model, of the batch nearest to 32; families take turns."""
    of_model: dict[str, Run] = {}
    for run in runs:
        known = of_model.get(run.model)
        if run.flag == "ok" and (known is None or abs(run.batch_size - _BATCH) < abs(known.batch_size - _BATCH)):
            of_model[run.model] = run
    of_family: dict[str, list[Run]] = {}
    for run in of_model.values():
        of_family.setdefault(run.family, []).append(run)
    places = ((place, run) for family in of_family.values() for place, run in enumerate(family))
    return [run for _, run in sorted(places, key=lambda pair: pair[0])]


def by_both(run: Run) -> dict[str, Any]:
    """Returns what the steps of a run reserve by each route, and the bytes of its largest convolution."""
    found: dict[str, Any] = {"convolution_bytes": 0}
    for route, recorded in (("translate", translated_trace), ("phantom", _by_phantom)):
        begin = time.perf_counter()
        trace = recorded(run)
        reserved_bytes = reserved_bytes_of(trace)
        found[route] = {"reserved_bytes": reserved_bytes, "seconds": round(time.perf_counter() - begin, 2)}
        found["convolution_bytes"] = convolution_bytes(trace)
    return found


def _by_phantom(run: Run) -> Trace:
    workload = workload_of(run)
    return record_on_phantom(workload, workload.make_batch, hardware_named(DEVICE)).training


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns errors of both routes, with what the card shows beside the allocator fitted on other families, by kind.

    Covered are runs that needed no more than forecast and margin: the margin that is shipped, and that without its
    share of the largest convolution, for which the phantom's forecast has cuDNN's own workspaces.
    """
    good = [row for row in rows if "failure" not in row]
    kinds = np.array([row["kind"] for row in good])
    true = np.array([row["measured_bytes"] for row in good], dtype=float)
    families = [row["family"] for row in good]
    found: dict[str, Any] = {"num_rows": len(good)}
    for route in ROUTES:
        reserved = np.array([row[route]["reserved_bytes"] for row in good], dtype=float)
        predicted = linear_arm((np.ones(len(good)),), true, families, reserved)
        found[route] = {"all": summary(predicted, true)}
        for kind in sorted(set(kinds)):
            found[route][str(kind)] = summary(predicted[kinds == kind], true[kinds == kind])
        for name, share in (("covered_share", 1), ("covered_share_without_convolutions", 0)):
            found[route][name] = float(np.mean([_covers(row, row[route]["reserved_bytes"], share) for row in good]))
    return found


def _covers(row: dict[str, Any], reserved_bytes: int, share: int) -> bool:
    """Tells whether forecast and margin are what the run needed, the share of its convolution in it or not."""
    hardware = hardware_named(DEVICE)
    margin = margin_bytes(hardware, reserved_bytes, share * row["convolution_bytes"])
    return bool(reserved_bytes + hardware.context_bytes[0] + margin >= row["measured_bytes"])


def kinds_of(found: dict[str, Any]) -> list[str]:
    """Returns the kinds of models of which there are enough for a median, all of them together first."""
    return [kind for kind, each in found["phantom"].items() if isinstance(each, dict) and "median" in each]


def line(kind: str, found: dict[str, Any]) -> str:
    """Returns a row of the page's table: median and 90th percentile of each route's errors, in percent."""
    cells = [f"{100 * found[route][kind][name]:.1f}" for route in ROUTES for name in ("median", "p90")]
    return f"| {kind} | {found['translate'][kind]['num_rows']} | {' | '.join(cells)} |"


def document_of(rows: Sequence[dict[str, Any]], path: Path, timm: str) -> dict[str, Any]:
    """Returns the result file."""
    document = provenance()
    document["versions"]["timm"] = timm
    return document | {
        "schema": "memwall.benchmarks.routes-external/1",
        "tag": "simulated against external",
        "source": "GPUMemNet, doi 10.1145/3805621.3807621; measured_bytes are nvidia-smi's of the card",
        "runs_sha256": file_sha256(path),
        "device": DEVICE,
        "allocator": ALLOCATOR,
        "median_seconds": median(row["phantom"]["seconds"] for row in rows if "failure" not in row),
        "tables": tables(rows),
        "rows": list(rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="CSV")
    parser.add_argument("--seconds", type=float, default=1200.0)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    os.environ |= {"PHANTOM_CARD": DEVICE, "PHANTOM_CUDNN": "real", "PHANTOM_MEMORY_BYTES": str(2 << 40)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    timm = import_timm()
    before = json.loads(options.output.read_text()) if options.output.exists() else {}
    rows: dict[str, dict[str, Any]] = {row["key"]: row for row in before.get("rows", [])}
    begin = time.monotonic()
    for run in asked(read_runs(options.runs)):
        if run.key in rows:
            continue
        if time.monotonic() - begin > options.seconds:
            break
        rows[run.key] = {
            "key": run.key,
            "family": run.family,
            "kind": run.kind,
            "measured_bytes": run.measured_gpu_mib * _MIB,
            **forked(partial(by_both, run)),
        }
        if len(rows) % _ROWS_BETWEEN == 0:
            options.output.write_text(json.dumps(document_of(list(rows.values()), options.runs, timm), indent=1) + "\n")
    document = document_of(list(rows.values()), options.runs, timm)
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    found = document["tables"]
    for kind in kinds_of(found):
        print(line(kind, found))
    for route in ROUTES:
        print(route, {name: share for name, share in found[route].items() if name.startswith("covered")})


if __name__ == "__main__":
    main()
