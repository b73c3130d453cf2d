"""The claim: with an optimizer's state on disk a run keeps to its budget, and the disk works at its own speed.

    python benchmarks/optimizer_state.py [--rounds 5] [--disk DIR]
    python benchmarks/optimizer_state.py --quick          # a small model, one round; nothing is written

A stack of linear layers with AdamW, in a process of its own for each arm of each round; rounds alternate their order.
Arms: plain; memwall at the smallest budget there is, where state and parameters are on disk; both with torch's for-loop
and with its fused step, beside which the disk is what takes the time. Between two steps the disk is read and written
with O_DIRECT, without memwall: what share of that speed the optimizer's step reaches is the median over steps. Bytes
are the kernel's (VmHWM, /proc/self/io). Writes results/cpu/optimizer_state.json.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from knob_report import provenance
from raw_disk import RawDisk, io_bytes
from torch import nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.meter import process_peak_bytes, reset_process_peak
from memwall.observe.measure import run_report

OUTPUT = Path(__file__).parent / "results" / "cpu" / "optimizer_state.json"
WIDTH, NUM_LAYERS, BATCH, NUM_STEPS = 1024, 48, 32, 8
QUICK_LAYERS, QUICK_STEPS = 16, 4
GOAL_SHARE = 0.8
_TIMEOUT_S = 600.0


def make(num_layers: int, *, is_fused: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(num_layers)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=is_fused or None)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, disk: RawDisk) -> list[dict[str, float]]:
    """Seconds of each step and of its optimizer, what moved, and what the disk needed for a byte just before."""
    rows = []
    for step in steps:
        write, read = disk.seconds_per_byte()
        moved = io_bytes()
        begin = time.perf_counter()
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        read_bytes, written_bytes = (now - then for now, then in zip(io_bytes(), moved, strict=True))
        optimizer.zero_grad()
        rows.append(
            {
                "step_seconds": end - begin,
                "optimizer_seconds": end - before,
                "read_bytes": read_bytes,
                "written_bytes": written_bytes,
                "disk_seconds": read_bytes * read + written_bytes * write,
            }
        )
    return rows


def run_child(arm: str, num_layers: int, num_steps: int, directory: str, budget_bytes: int) -> dict[str, Any]:
    """One arm in this process; "probe" finds the smallest budget."""
    torch.set_num_threads(1)
    model, optimizer = make(num_layers, is_fused=arm.endswith("fused"))
    disk = RawDisk(directory)
    if arm.startswith("probe"):
        session = memwall.fit(model, optimizer, budget=1 << 20, disk=directory)
        train(model, optimizer, range(1), disk)
        try:
            session.end_step()
        except InfeasibleError as error:
            return {"smallest_feasible_bytes": error.smallest_feasible_bytes}
        raise RuntimeError("a budget of 1 MiB is feasible")
    out: dict[str, Any]
    if arm.startswith("plain"):
        train(model, optimizer, range(1), disk)
        reset_process_peak()
        rows = train(model, optimizer, range(1, num_steps), disk)
        out = {"peak_bytes": process_peak_bytes()}
    else:
        with memwall.fit(model, optimizer, budget=budget_bytes, disk=directory) as session:
            rows = train(model, optimizer, range(num_steps), disk)[1:]
            out = {"peak_bytes": process_peak_bytes()}
        report = run_report(session)
        forecast = report.forecast
        out |= {
            "first_step_peak_bytes": session.measured.first_step_peak_bytes,
            "predicted_peak_bytes": forecast.phases["steady_step"].process_bytes,
            "margin_bytes": forecast.margin_bytes,
            "predicted_step_seconds": forecast.step_seconds,
            "predicted_moved_bytes": forecast.moved_bytes_per_step,
            "actions": [type(action).__name__ for action in forecast.actions],
        }
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().numpy().data)
    return out | {"rows": rows, "sha256": weights.hexdigest()}


def in_a_process(arm: str, num_layers: int, num_steps: int, directory: str, budget_bytes: int = 0) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", arm, str(num_layers), str(num_steps), directory, str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One arm over all rounds: medians and quartiles over steps, and the highest peak."""
    rows = [row for run in runs for row in run["rows"]]
    out: dict[str, Any] = {
        name: statistics.quantiles([row[name] for row in rows], n=4, method="inclusive")
        for name in ("step_seconds", "optimizer_seconds")
    }
    out["peak_bytes"] = max(run["peak_bytes"] for run in runs)
    if any(row["written_bytes"] for row in rows):
        shares = [row["disk_seconds"] / row["optimizer_seconds"] for row in rows]
        out["disk_share"] = statistics.quantiles(shares, n=4, method="inclusive")
        for name in ("read_bytes", "written_bytes"):
            out[name] = statistics.median(row[name] for row in rows)
    for name in ("first_step_peak_bytes", "predicted_peak_bytes", "margin_bytes", "predicted_step_seconds"):
        if name in runs[0]:
            out[name] = max(run[name] for run in runs)
    if "actions" in runs[0]:
        out["actions"] = runs[0]["actions"]
        out["predicted_moved_bytes"] = runs[0]["predicted_moved_bytes"]
    return out


def measure(num_layers: int, num_steps: int, num_rounds: int, directory: str) -> dict[str, Any]:
    """All arms, interleaved."""
    budgets = {
        kind: in_a_process(f"probe{kind}", num_layers, 1, directory)["smallest_feasible_bytes"]
        for kind in ("", "-fused")
    }
    arms = ("plain", "disk", "plain-fused", "disk-fused")
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for number in range(num_rounds):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            kind = "-fused" if arm.endswith("fused") else ""
            # A little room above the smallest: two processes do not begin with the same bytes.
            runs[arm].append(in_a_process(arm, num_layers, num_steps, directory, int(budgets[kind] * 1.01)))
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    cells = []
    for kind in ("", "-fused"):
        plain, disk = runs[f"plain{kind}"], runs[f"disk{kind}"]
        cells.append(
            {
                "optimizer": f"AdamW{kind.replace('-', ' ')}",
                "budget_bytes": int(budgets[kind] * 1.01),
                "plain": summary(plain),
                "memwall": summary(disk),
                "has_same_weights": len({run["sha256"] for run in (*plain, *disk)}) == 1,
            }
        )
    return {"num_layers": num_layers, "width": WIDTH, "batch": BATCH, "num_rounds": num_rounds, "cells": cells}


def show(cell: dict[str, Any]) -> None:
    plain, disk = cell["plain"], cell["memwall"]
    print(
        f"{cell['optimizer']}: peak {plain['peak_bytes'] / 2**20:,.0f} -> {disk['peak_bytes'] / 2**20:,.0f} MiB "
        f"(predicted {disk['predicted_peak_bytes'] / 2**20:,.0f}, first step "
        f"{disk['first_step_peak_bytes'] / 2**20:,.0f}, budget {cell['budget_bytes'] / 2**20:,.0f}); step "
        f"{plain['step_seconds'][1]:.3f} -> {disk['step_seconds'][1]:.3f} s "
        f"(predicted {disk['predicted_step_seconds']:.3f}); of the disk's speed "
        f"{disk['disk_share'][1]:.0%} ({disk['disk_share'][0]:.0%}-{disk['disk_share'][2]:.0%}); "
        f"same weights: {'yes' if cell['has_same_weights'] else 'NO'}"
    )


def holds(cell: dict[str, Any]) -> bool:
    """Whether the run kept to its budget and to its weights, and the disk worked where it is what takes the time."""
    disk = cell["memwall"]
    is_kept = max(disk["peak_bytes"], disk["first_step_peak_bytes"]) <= cell["budget_bytes"]
    is_bound = cell["plain"]["optimizer_seconds"][1] < 0.5 * disk["optimizer_seconds"][1]
    return cell["has_same_weights"] and is_kept and (not is_bound or disk["disk_share"][1] >= GOAL_SHARE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="optimizer state on disk, beside a plain run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="a small model, one round; nothing is written")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        arm, num_layers, num_steps, directory, budget_bytes = options.child
        print(json.dumps(run_child(arm, int(num_layers), int(num_steps), directory, int(budget_bytes))))
        return 0
    num_layers, num_steps = (QUICK_LAYERS, QUICK_STEPS) if options.quick else (NUM_LAYERS, NUM_STEPS)
    result = measure(num_layers, num_steps, 1 if options.quick else options.rounds, options.disk)
    for cell in result["cells"]:
        show(cell)
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.optimizer-state/1"}
        OUTPUT.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    return 0 if all(holds(cell) for cell in result["cells"]) else 1


if __name__ == "__main__":
    sys.exit(main())
