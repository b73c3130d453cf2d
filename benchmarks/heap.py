"""Measures the cost of freed memory, by malloc and by the tensor heap, beside what is foreseen.

    python benchmarks/heap.py [--workload NAME ...] [--rounds N] [--steps N] [--output FILE]

Each way trains each workload of `knobs.py` in fresh processes that take turns. Tensors are the same everywhere, so all
that differs is what the allocator keeps and what page faults cost. Prints a table, writes JSON.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from knob_arms import NUM_THREADS
from knob_report import provenance
from workloads import WORKLOADS

from memwall.apply.memory.allocator import AllocatorHandler
from memwall.machine.meter import process_bytes, process_peak_bytes, reset_process_peak, return_free_memory
from memwall.predict.curve import live_peak_bytes
from memwall.predict.malloc.malloc_calls import events_of
from memwall.predict.malloc.malloc_replay import replay
from memwall.predict.malloc.tensor_heap import replay_in_heap
from memwall.trace.trace_builder import TraceBuilder

WAYS = ("default", "tensor-heap")
_RESULTS = Path(__file__).parent / "results" / "cpu" / "heap.json"
_MIB = 1 << 20


def train(name: str, way: str, num_steps: int) -> dict[str, Any]:
    """Trains in this process, which should be fresh; the first two steps warm up."""
    torch.set_num_threads(NUM_THREADS)
    workload = WORKLOADS[name]
    model = workload.build()
    optimizer = workload.optimizer(model)
    return_free_memory()
    base_bytes = process_bytes() - sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    if way == "tensor-heap":
        AllocatorHandler().apply(way)
    seconds, losses, faults = [], [], 0
    for number in range(2 + num_steps):
        batch = workload.batch(number)
        if number == 2:
            reset_process_peak()
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        del loss, batch
    return {
        "base_bytes": base_bytes,
        "peak_bytes": process_peak_bytes(),
        "step_seconds": statistics.median(seconds[2:]),
        "faults_per_step": (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / num_steps,
        "losses": losses,
    }


def predict(name: str) -> dict[str, Any]:
    """What the recorded steady step keeps resident, tensors and allocator alone."""
    torch.set_num_threads(NUM_THREADS)
    workload = WORKLOADS[name]
    model = workload.build()
    optimizer = workload.optimizer(model)
    builder = TraceBuilder([model])
    for number in range(2):
        builder.start_step(optimizer)
        workload.loss(model, workload.batch(number)).backward()
        optimizer.step()
        optimizer.zero_grad()
        builder.finish_step(optimizer)
    step = builder.trace(optimizer).steps[-1]
    malloc, heap = replay(events_of(step)), replay_in_heap(events_of(step, has_small_blocks=False))
    return {
        "live_bytes": live_peak_bytes(step, "cpu"),
        "resident_bytes": {"default": malloc.peak_resident_bytes, "tensor-heap": heap.peak_resident_bytes},
    }


def measure(name: str, num_rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """One row per way."""
    predicted = _in_fresh_process("--predict", name)
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for number in range(num_rounds):
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            runs[way].append(_in_fresh_process("--train", name, way, "--steps", str(num_steps)))
    default = runs["default"]
    rows = []
    for way in WAYS:
        peaks = sorted(run["peak_bytes"] - run["base_bytes"] for run in runs[way])
        ratios = [
            ours["step_seconds"] / theirs["step_seconds"] for ours, theirs in zip(runs[way], default, strict=True)
        ]
        rows.append(
            {
                "workload": name,
                "way": way,
                "live_bytes": predicted["live_bytes"],
                "predicted_bytes": predicted["resident_bytes"][way],
                "measured_bytes": statistics.median(peaks),
                "measured_bytes_range": [peaks[0], peaks[-1]],
                "faults_per_step": statistics.median(run["faults_per_step"] for run in runs[way]),
                "step_seconds": [run["step_seconds"] for run in runs[way]],
                "time_ratio_to_default": statistics.median(ratios),
                "same_losses": all(run["losses"] == default[0]["losses"] for run in runs[way]),
            }
        )
    return rows


def _in_fresh_process(*arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown; bytes without the process's base."""
    lines = ["| workload | way | tensors MiB | predicted | measured (range) | faults a step | time | same losses |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        low, high = (value / _MIB for value in row["measured_bytes_range"])
        lines.append(
            f"| {row['workload']} | {row['way']} | {row['live_bytes'] / _MIB:,.0f} "
            f"| {row['predicted_bytes'] / _MIB:,.0f} | {row['measured_bytes'] / _MIB:,.0f} ({low:,.0f}-{high:,.0f}) "
            f"| {row['faults_per_step']:,.0f} | {row['time_ratio_to_default']:.3f} "
            f"| {'yes' if row['same_losses'] else '**no**'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=2, metavar=("WORKLOAD", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--predict", metavar="WORKLOAD", help=argparse.SUPPRESS)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps per process")
    parser.add_argument("--output", type=Path, default=_RESULTS)
    options = parser.parse_args()
    if options.train:
        print(json.dumps(train(*options.train, options.steps)))
        return
    if options.predict:
        print(json.dumps(predict(options.predict)))
        return
    rows: list[dict[str, Any]] = []
    for name in options.workload or WORKLOADS:
        rows += measure(name, options.rounds, options.steps)
        print(table(rows[-len(WAYS) :]), flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {**provenance(), "schema": "memwall.benchmarks.heap/1", "rows": rows}
    options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
