"""What recording a step costs, against the same step unrecorded; the issue's bound is 1.5x.

    python benchmarks/recording_cost.py

Plain and recorded steps alternate in one process, on the models the tests use (`tests/zoo.py`, size mid). Written to
benchmarks/results/cpu/recording_cost.json.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo import MODELS, optimizers, trained_parameters

from memwall.trace.record import TraceBuilder

NUM_ROUNDS = 5
OUTPUT = Path(__file__).parent / "results" / "cpu" / "recording_cost.json"


def measure(name: str) -> dict[str, Any]:
    """Ratio of recorded to plain step seconds of one model, over interleaved rounds."""
    case = MODELS[name]("mid")
    optimizer = optimizers()["adamw_foreach"](trained_parameters(case.model))

    def step() -> None:
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    builder = TraceBuilder([case.model])
    plain, recorded = [], []
    step()
    for number in range(NUM_ROUNDS + 1):
        begin = time.perf_counter()
        step()
        middle = time.perf_counter()
        builder.start_step(optimizer)
        step()
        builder.finish_step(optimizer)
        end = time.perf_counter()
        if number:  # the first recording measures operators' workspaces; `memwall run` pays it once
            plain.append(middle - begin)
            recorded.append(end - middle)
        else:
            first_ratio = (end - middle) / (middle - begin)
    ratios = [ours / theirs for ours, theirs in zip(recorded, plain, strict=True)]
    return {
        "model": name,
        "plain_seconds_median": statistics.median(plain),
        "ratio_quartiles": statistics.quantiles(ratios, n=4, method="inclusive"),
        "first_ratio": first_ratio,
    }


def main() -> None:
    torch.set_num_threads(2)
    rows = []
    for name in MODELS:
        rows.append(measure(name))
        low, middle, high = rows[-1]["ratio_quartiles"]
        print(f"{name:10} {middle:.2f}x ({low:.2f}-{high:.2f}), first {rows[-1]['first_ratio']:.2f}x", flush=True)
    OUTPUT.write_text(json.dumps({**provenance(), "tag": "cpu-measured", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
