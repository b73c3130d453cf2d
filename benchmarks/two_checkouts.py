"""The claim: a change of the code's shape changes neither the bits of a training, nor its peak, nor the time of a step.

    git worktree add ../before COMMIT && make -C ../before venv
    python benchmarks/two_checkouts.py ../before [--shares 110 70 30 10] [--rounds 7]

Each cell is a workload and a budget of the published `results/cpu/knobs.json`. The other checkout and this one train
it side by side, each in a process of its own, in turn by single steps and in random order. Shown are the ratio of their
steps (median and quartiles of the rounds' ratios), their peaks, how many actions each plan has, and whether losses,
weights and buffers are the same bits. Plans follow measured times: two runs of one checkout may choose differently,
too. Writes results/cpu/two_checkouts.json; ends with status 1 where bits differ.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knob_report import RESULT as KNOBS
from knob_report import provenance
from knobs import Worker, progress

OUTPUT = Path(__file__).parent / "results" / "cpu" / "two_checkouts.json"
SHARES_PERCENT = (110, 70, 30, 10)
NUM_ROUNDS = 7


def measure(before: Path, workload: str, share: int, budget_bytes: int, num_rounds: int) -> dict[str, Any]:
    """Returns one cell: what both checkouts made of a workload at a budget."""
    progress(f"{workload} at {share} %, {budget_bytes / 2**20:,.0f} MiB")
    workers: list[Worker] = []
    try:
        for checkout in (before, None):
            workers.append(Worker(workload, f"memwall-{share}", budget_bytes, checkout=checkout))
        order = random.Random(share)
        for _ in range(num_rounds):
            for worker in order.sample(workers, len(workers)):
                worker.step()
        old, new = (worker.finish() for worker in workers)
    finally:
        for worker in workers:
            worker.close()
    ratios = [b / a for a, b in zip(old["step_seconds"], new["step_seconds"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "workload": workload,
        "share_percent": share,
        "budget_bytes": budget_bytes,
        "step_ratio": {"low": low, "median": median, "high": high},
        "peak_bytes": {"before": old["peak_bytes"], "after": new["peak_bytes"]},
        "predicted_bytes": {"before": old["predicted_peak_bytes"], "after": new["predicted_peak_bytes"]},
        "has_same_bits": all(old[name] == new[name] for name in ("losses", "weights_sha256", "buffers_sha256")),
        "num_actions_before": len(old["actions"]),
        "num_actions_after": len(new["actions"]),
    }


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Returns the cells as lines of Markdown."""
    lines = [
        "| workload | share | step after/before (quartiles) | peak MiB before, after | actions | bits |",
        "|" + " --- |" * 6,
    ]
    for cell in cells:
        ratio, peak = cell["step_ratio"], cell["peak_bytes"]
        lines.append(
            f"| {cell['workload']} | {cell['share_percent']} % "
            f"| {ratio['median']:.3f} ({ratio['low']:.3f}-{ratio['high']:.3f}) "
            f"| {peak['before'] / 2**20:,.0f}, {peak['after'] / 2**20:,.0f} "
            f"| {cell['num_actions_before']}, {cell['num_actions_after']} "
            f"| {'same' if cell['has_same_bits'] else 'DIFFER'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--workload", action="append", help="default: all that are published")
    parser.add_argument("--shares", type=int, nargs="+", default=list(SHARES_PERCENT), help="of the range, in percent")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="timed steps of each")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    before = options.before.resolve()
    published = json.loads(KNOBS.read_text())["workloads"]
    cells = [
        measure(before, record["workload"], share, record["budgets_bytes"][str(share)], options.rounds)
        for record in published
        for share in options.shares
        if options.workload is None or record["workload"] in options.workload
    ]
    result = {**provenance(), "schema": "memwall.benchmarks.two_checkouts/1", "cells": cells}
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(cells))
    return 0 if all(cell["has_same_bits"] for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
