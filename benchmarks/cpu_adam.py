"""How fast two kernels step AdamW on a CPU: torch's fused one, and DeepSpeed's where it is built.

    make bench-cpu-adam

Parameters of 1, 8 and 64 million elements in float32, with one thread and with all; steps take turns. Writes
results/cpu/cpu_adam.json.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance

from memwall.apply.optimizer_state.deepspeed_adam import DeepSpeedAdam, load_operator

OUTPUT = Path(__file__).parent / "results" / "cpu" / "cpu_adam.json"
_NUM_ELEMENTS = (1 << 20, 8 << 20, 64 << 20)
# A parameter, its gradient and two moments are read, all but the gradient are written.
_BYTES_PER_ELEMENT = 7 * torch.float32.itemsize


def measure(num_elements: int, num_threads: int, num_rounds: int, operator: Any) -> dict[str, Any]:
    """Both kernels in turns, on parameters of their own."""
    torch.set_num_threads(num_threads)
    arms: dict[str, Callable[[], object]] = {}
    for name in ("torch", "deepspeed"):
        parameter = torch.zeros(num_elements)
        parameter.grad = torch.full((num_elements,), 1e-3)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        arms[name] = optimizer.step if name == "torch" else partial(DeepSpeedAdam(operator).step, optimizer)
        arms[name]()  # makes the moments, and the threads
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(num_rounds):
        for name, step in arms.items():
            begin = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - begin)
    ratios = [ours / theirs for ours, theirs in zip(seconds["torch"], seconds["deepspeed"], strict=True)]
    return {
        "num_elements": num_elements,
        "num_threads": num_threads,
        "seconds": {name: quartiles(values) for name, values in seconds.items()},
        "bytes_per_second": {
            name: num_elements * _BYTES_PER_ELEMENT / statistics.median(values) for name, values in seconds.items()
        },
        "time_ratio_torch_to_deepspeed": quartiles(ratios),
    }


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 2 where DeepSpeed's kernel is not built."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args(arguments)
    operator = load_operator()
    if operator is None:
        print("DeepSpeed's cpu_adam is not built here; run `make bench-cpu-adam`, which builds it", file=sys.stderr)
        return 2
    cells = []
    for num_threads in sorted({1, os.cpu_count() or 1}):
        for num_elements in _NUM_ELEMENTS:
            cell = measure(num_elements, num_threads, options.rounds, operator)
            cells.append(cell)
            speeds = ", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in cell["bytes_per_second"].items())
            low, middle, high = cell["time_ratio_torch_to_deepspeed"]
            size = f"{num_elements / 2**20:.0f} M elements, {num_threads} thread{'s' * (num_threads > 1)}"
            print(f"{size}: {speeds}; torch's time to DeepSpeed's {middle:.2f} ({low:.2f}-{high:.2f})")
    facts = {**provenance(), "schema": "memwall.benchmarks.cpu-adam/1", "cells": cells}
    OUTPUT.write_text(json.dumps(facts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
