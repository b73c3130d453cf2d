"""What recording a step costs, against the same step unrecorded; the bound is 1.5x.

    python benchmarks/recording_cost.py

On the models the tests use (`tests/zoo.py`, size mid). Steady steps: plain and recorded ones alternate in one process.
First steps: as `memwall run` meets them, each in a process of its own, plain and recorded ones in turn; the recorded
one also measures the process's base and each operator's workspace. Written to
benchmarks/results/cpu/recording_cost.json.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from zoo import MODELS, optimizers, trained_parameters

from memwall.trace.trace_builder import TraceBuilder

NUM_ROUNDS, NUM_FIRST_ROUNDS = 5, 3
BOUND = 1.5
OUTPUT = Path(__file__).parent / "results" / "cpu" / "recording_cost.json"


def plain_and_recorded(name: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """A model's step, as it is and recorded."""
    case = MODELS[name]("mid")
    optimizer = optimizers()["adamw_foreach"](trained_parameters(case.model))
    builder = TraceBuilder([case.model])

    def step() -> None:
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def recorded() -> None:
        builder.start_step(optimizer)
        step()
        builder.finish_step(optimizer)

    return step, recorded


def seconds_of(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def steady_ratios(name: str) -> tuple[float, list[float]]:
    """Median plain seconds, and recorded over plain seconds in interleaved rounds."""
    plain, recorded = plain_and_recorded(name)
    plain()
    recorded()  # the first recording is measured by itself
    pairs = [(seconds_of(plain), seconds_of(recorded)) for _ in range(NUM_ROUNDS)]
    return statistics.median(p for p, _ in pairs), [r / p for p, r in pairs]


def first_ratios(name: str) -> tuple[float, list[float]]:
    """The same of first steps, each in a fresh process; each round has the other order."""
    rounds = []
    for number in range(NUM_FIRST_ROUNDS):
        order = ("plain", "recorded") if number % 2 == 0 else ("recorded", "plain")
        seconds = {}
        for arm in order:
            done = subprocess.run([sys.executable, __file__, name, arm], check=True, capture_output=True, text=True)
            seconds[arm] = float(done.stdout)
        rounds.append(seconds)
    return statistics.median(r["plain"] for r in rounds), [r["recorded"] / r["plain"] for r in rounds]


def measure(name: str) -> dict[str, Any]:
    steady_seconds, steady = steady_ratios(name)
    first_seconds, first = first_ratios(name)
    return {
        "model": name,
        "plain_seconds_median": steady_seconds,
        "ratio_quartiles": statistics.quantiles(steady, n=4, method="inclusive"),
        "first_plain_seconds_median": first_seconds,
        "first_ratio_quartiles": statistics.quantiles(first, n=4, method="inclusive"),
    }


def main() -> int:
    torch.set_num_threads(2)
    if len(sys.argv) == 3:  # a process of its own for one first step
        name, arm = sys.argv[1:]
        plain, recorded = plain_and_recorded(name)
        print(seconds_of(plain if arm == "plain" else recorded))
        return 0
    rows = []
    for name in MODELS:
        row = measure(name)
        rows.append(row)
        quartiles = (row["ratio_quartiles"], row["first_ratio_quartiles"])
        steady, first = (f"{middle:.2f}x ({low:.2f}-{high:.2f})" for low, middle, high in quartiles)
        print(f"{name:10} steady {steady}, first {first}", flush=True)
    OUTPUT.write_text(json.dumps({**provenance(), "tag": "cpu-measured", "rows": rows}, indent=1) + "\n")
    return 0 if all(max(r["ratio_quartiles"][1], r["first_ratio_quartiles"][1]) <= BOUND for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
