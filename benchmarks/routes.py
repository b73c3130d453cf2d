"""Forecasts cases of the zoo by both routes, beside what an H100 once held. Forecasts are simulated.

    python benchmarks/routes.py [CASE ...]

Each case is FAMILY/PRECISION/OPTIMIZER, by default those that `results/nvidia-h100-80gb-hbm3/prediction.json` has of
eight families, the first of each. `make phantom` has to have built the environment, or PHANTOM_ENV to name one. Writes
results/simulated/routes.json. Bytes are those at the peak of the training steps; the H100's are torch 2.11's.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance

from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.planning.estimate import estimate
from memwall.trace.records import Route

HERE = Path(__file__).parent
OUTPUT = HERE / "results" / "simulated" / "routes.json"
RECORDED = HERE / "results" / "nvidia-h100-80gb-hbm3" / "prediction.json"
FAMILIES = ("resnet", "convnext", "mobilenet", "unet", "vit", "whisper", "gpt2", "llama")
ROUTES: tuple[Route, ...] = ("translate", "phantom")
QUANTITIES = ("allocated_bytes", "reserved_bytes")
_STEPS = ("first_step", "steady_step")


def recorded_cases() -> dict[str, dict[str, int]]:
    """Returns what the H100 held of the first case of each family, by the name of the case."""
    found: dict[str, dict[str, int]] = {}
    rows = json.loads(RECORDED.read_text())["rows"]
    for family in FAMILIES:
        row = next(row for row in rows if row["family"] == family)
        name = "/".join((family, row["precision"], row["optimizer"]))
        found[name] = {quantity: row["measured"][quantity] for quantity in QUANTITIES}
    return found


def forecast(case: str, route: Route) -> dict[str, Any]:
    """Returns what a route foresees of a case's steps, and the seconds that the answer takes."""
    hardware = hardware_named("h100-80gb")
    begin = time.perf_counter()
    run = device_run_of_spec(f"{HERE / 'routes_cases.py'}:{case}", hardware, route=route)
    found = estimate(run.training, hardware, torch_version=run.training.torch_version)
    peaks = [found.phases[step] for step in _STEPS]
    return {
        "allocated_bytes": max(peak.allocated_bytes for peak in peaks),
        "reserved_bytes": max(peak.reserved_bytes or 0 for peak in peaks),
        "margin_bytes": found.margin_bytes,
        "torch": run.training.torch_version,
        "seconds": round(time.perf_counter() - begin, 1),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown: MiB of each route, and how far they are from the H100's."""
    head = "| case | allocated: translate | phantom | H100 | reserved: translate | phantom | H100 |"
    lines = [head, "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
    for row in rows:
        cells = [row["case"]]
        for quantity in QUANTITIES:
            held = row["h100"].get(quantity) if row["h100"] else None
            for route in ROUTES:
                found = row[route][quantity]
                cells.append(f"{found / 2**20:,.1f}" + (f" ({found / held - 1:+.1%})" if held else ""))
            cells.append(f"{held / 2**20:,.1f}" if held else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    parser.add_argument("cases", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = recorded_cases()
    rows = [
        {"case": case, "h100": known.get(case), **{route: forecast(case, route) for route in ROUTES}}
        for case in options.cases or known
    ]
    document = {
        **provenance(),
        "schema": "memwall.benchmarks.routes/1",
        "tag": "simulated",
        "device": "h100-80gb",
        "h100": "counted by torch 2.11.0 on an NVIDIA H100 80GB HBM3 (gpu-measured)",
        "rows": rows,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
