"""AdamW's moments in 8 bits beside those on disk: bytes, seconds and loss, each against its forecast.

    make bench-low-bit                                   # installs torchao beside the other packages first
    python benchmarks/low_bit_state.py [--rounds 3] [--disk DIR]
    python benchmarks/low_bit_state.py --quick           # one round on the slowest disk; nothing is written

A stack of linear layers with AdamW under one budget, which holds its moments in 8 bits or not at all: plans without
(exact) and with `--allow low-bit-optimizer` (low), on this machine's disk and on the same disk held to less, in
processes of their own, in turns. Shown are peak and median step, the forecast's beside them, and the last loss beside
plain PyTorch's. The first line is what importing torchao takes in a process that has an optimizer, and what opening and
closing a moment costs at best for each element, with one thread and two. Writes results/cpu/low_bit_state.json.
"""

import argparse
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
from packed_offload import hold_disk
from torch import Tensor, nn

import memwall
from memwall.apply.optimizer_state.low_bit import LowBitMoments
from memwall.apply.optimizer_state.low_bit_form import load_torchao
from memwall.machine.meter import process_bytes, process_peak_bytes, reset_process_peak
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.predict.low_bit_moments import SLICE_ELEMENTS

OUTPUT = Path(__file__).parent / "results" / "cpu" / "low_bit_state.json"
SHARE, NUM_STEPS = 0.85, 6
WIDTH, NUM_LAYERS, BATCH = 1024, 48, 64
DISKS_MIB_PER_SECOND = (0, 200, 50)
_TIMEOUT_S = 900.0


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, the same in every process, and what steps it."""
    torch.manual_seed(0)
    layers = [layer for _ in range(NUM_LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    """Seconds and loss of each step."""
    seconds, losses = [], []
    for step in range(NUM_STEPS):
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        begin = time.perf_counter()
        loss: Tensor = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    return seconds, losses


def run_costs() -> dict[str, Any]:
    """What torchao takes in a process that has memwall's session, and a moment's elements in time."""
    parameter = nn.Parameter(torch.randn(8 * SLICE_ELEMENTS))
    optimizer = torch.optim.AdamW([parameter])  # which imports torch._dynamo, as torchao does
    before_bytes = process_bytes()
    load_torchao()
    found: dict[str, Any] = {"import_bytes": process_bytes() - before_bytes, "seconds_per_element": {}}
    moments = LowBitMoments(optimizer)
    moment, values = moments.new(parameter, "exp_avg"), torch.randn(SLICE_ELEMENTS)
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        rounds = []
        for begin in range(0, 8 * SLICE_ELEMENTS, SLICE_ELEMENTS):
            start = time.perf_counter()
            moments.write(moment, begin, begin + SLICE_ELEMENTS, values)
            moments.opened(moment, begin, begin + SLICE_ELEMENTS)
            rounds.append(time.perf_counter() - start)
        found["seconds_per_element"][str(num_threads)] = min(rounds) / SLICE_ELEMENTS
    return found


def run_child(arm: str, budget_bytes: int, mib_per_second: int, directory: str) -> dict[str, Any]:
    """One arm in this process: plain, exact or low."""
    if arm == "costs":
        return run_costs()
    torch.set_num_threads(1)
    model, optimizer = make()
    if arm == "plain":
        reset_process_peak()
        seconds, losses = train(model, optimizer)
        return {"peak_bytes": process_peak_bytes(), "step_seconds": statistics.median(seconds[1:]), "losses": losses}
    hold_disk(mib_per_second)
    allow = ("low-bit-optimizer",) if arm == "low" else ()
    with memwall.fit(model, optimizer, budget=budget_bytes, allow=allow, disk=directory) as session:
        seconds, losses = train(model, optimizer)
        assert session.plan is not None
        forecast, measured = session.plan.forecast, session.measured
        return {
            "peak_bytes": measured.overall_peak_bytes,
            "steady_peak_bytes": measured.peak_bytes,
            "predicted_peak_bytes": forecast.phases["steady_step"].process_bytes,
            "step_seconds": statistics.median(seconds[2:]),
            "predicted_step_seconds": forecast.step_seconds,
            "moved_bytes": forecast.moved_bytes_per_step,
            "is_low_bit": any(isinstance(action, LowBitState) for action in session.plan.actions),
            "losses": losses,
        }


def in_a_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(disks: Sequence[int], num_rounds: int, directory: str) -> dict[str, Any]:
    """All arms, in turns, and the plain one whose peak the budget is a share of."""
    plain = in_a_process("plain", 0, 0, directory)
    budget_bytes = int(SHARE * plain["peak_bytes"])
    cells = [(arm, disk) for disk in disks for arm in ("exact", "low")]
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {cell: [] for cell in cells}
    for number in range(num_rounds):
        for arm, disk in cells if number % 2 == 0 else reversed(cells):
            runs[arm, disk].append(in_a_process(arm, budget_bytes, disk, directory))
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    rows = []
    for (arm, disk), found in runs.items():
        chosen = sorted(found, key=lambda run: run["step_seconds"])[(len(found) - 1) // 2]
        row = {name: value for name, value in chosen.items() if name not in ("losses", "step_seconds")}
        row["peak_bytes"] = max(run["peak_bytes"] for run in found)
        row["is_plain_loss"] = all(run["losses"] == plain["losses"] for run in found)
        row["last_loss"] = chosen["losses"][-1]
        seconds = sorted(run["step_seconds"] for run in found)
        rows.append({"arm": arm, "disk_bytes_per_second": disk << 20, "step_seconds": seconds, **row})
    return {
        "workload": f"{NUM_LAYERS} linear layers of {WIDTH} x {WIDTH}, AdamW",
        "num_steps": NUM_STEPS,
        "num_rounds": num_rounds,
        "budget_bytes": budget_bytes,
        "plain": {
            "peak_bytes": plain["peak_bytes"],
            "step_seconds": plain["step_seconds"],
            "last_loss": plain["losses"][-1],
        },
        "rows": rows,
    }


def show(result: dict[str, Any]) -> None:
    plain, costs, mib = result["plain"], result["costs"], 2**20
    one, two = (costs["seconds_per_element"][number] * 1e9 for number in ("1", "2"))
    print(
        f"importing torchao: {costs['import_bytes'] / mib:.0f} MiB; opening and closing a moment: {one:.0f} ns for "
        f"each element with one thread, {two:.0f} with two"
    )
    print(
        f"plain: {plain['peak_bytes'] / mib:,.0f} MiB, {plain['step_seconds']:.3f} s, loss {plain['last_loss']:.6f}; "
        f"budget {result['budget_bytes'] / mib:,.0f} MiB"
    )
    for row in result["rows"]:
        speed = row["disk_bytes_per_second"]
        disk = f"disk at {speed / mib:.0f} MiB/s" if speed else "this disk"
        form = "8 bits" if row["is_low_bit"] else "float32"
        print(
            f"{disk}, {row['arm']}: moments in {form}, {row['moved_bytes'] / mib:,.0f} MiB moved; step "
            f"{statistics.median(row['step_seconds']):.3f} s, predicted {row['predicted_step_seconds']:.3f} s; peak "
            f"{row['steady_peak_bytes'] / mib:,.0f} MiB, predicted {row['predicted_peak_bytes'] / mib:,.0f}; loss "
            f"{row['last_loss']:.6f}"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a budget was exceeded or the exact arm's losses are not the plain run's."""
    parser = argparse.ArgumentParser(description="AdamW's moments on disk, and in 8 bits")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="one round on one disk; nothing is written")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        arm, budget_bytes, mib_per_second, directory = options.child
        print(json.dumps(run_child(arm, int(budget_bytes), int(mib_per_second), directory)))
        return 0
    disks = DISKS_MIB_PER_SECOND[-1:] if options.quick else DISKS_MIB_PER_SECOND
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        result = {
            "costs": in_a_process("costs", 0, 0, directory),
            **measure(disks, 1 if options.quick else options.rounds, directory),
        }
    show(result)
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.low-bit-state/1"}
        OUTPUT.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    is_within = all(row["peak_bytes"] <= result["budget_bytes"] for row in result["rows"])
    return 0 if is_within and all(row["is_plain_loss"] for row in result["rows"] if row["arm"] == "exact") else 1


if __name__ == "__main__":
    sys.exit(main())
