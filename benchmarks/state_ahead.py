"""The claim: with state read during backward a step on disk is shorter, in no more memory and to the same bits.

    python benchmarks/state_ahead.py [--rounds 5] [--disk DIR]
    python benchmarks/state_ahead.py --quick          # a small model, one round; nothing is written

A GPT-2 of transformers (6 layers of 768, 4 x 512 tokens, AdamW in float32) under a budget between the smallest and
plain PyTorch's peak, where its optimizer's state goes to disk. One plan is made; the arms run it as it is (ahead) and
without its reading ahead (late), each in a process of its own, in turns, and beside them plain PyTorch. Bytes are the
kernel's (VmHWM). Writes results/cpu/state_ahead.json.
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

import msgspec
import torch
from knob_report import provenance
from transformers import GPT2Config, GPT2LMHeadModel

import memwall
from memwall.machine.meter import process_peak_bytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.optimizer_state import OptimizerPlacement

OUTPUT = Path(__file__).parent / "results" / "cpu" / "state_ahead.json"
ARMS = ("plain", "late", "ahead")
NUM_LAYERS, BATCH, NUM_STEPS, NUM_WARM = 6, 4, 8, 2
# Of the way from the smallest budget to the plain peak.
_BUDGET_SHARE = 0.3
_TIMEOUT_S = 600.0


def make(num_layers: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer, the same in every process."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=num_layers, n_positions=512, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False)
    model = GPT2LMHeadModel(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> list[dict[str, float]]:
    """Seconds of each step and of its optimizer."""
    rows = []
    for step in range(num_steps):
        ids = torch.randint(0, 50257, (BATCH, 512), generator=torch.Generator().manual_seed(step))
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        before = time.perf_counter()
        optimizer.step()
        end = time.perf_counter()
        optimizer.zero_grad()
        rows.append({"step_seconds": end - begin, "optimizer_seconds": end - before})
    return rows


def run_child(arm: str, num_layers: int, directory: str, budget_bytes: int) -> dict[str, Any]:
    """One arm in this process. "probe" finds the budgets that there are, "plan" makes the plan of one."""
    model, optimizer = make(num_layers)
    plan_file = Path(directory) / "plan.json"
    if arm in ("probe", "plan"):
        with memwall.fit(model, optimizer, budget=budget_bytes, disk=directory) as session:
            train(model, optimizer, 2)
        assert session.plan is not None
        session.plan.save(plan_file)
        forecast = session.plan.forecast
        assert forecast.plain_peak is not None
        return {
            "smallest_bytes": forecast.smallest_feasible_budget_bytes,
            "plain_bytes": forecast.plain_peak.process_bytes,
            "ahead_bytes": max((one.buffer_bytes for one in state_of(session.plan).steps_ahead), default=0)
            if arm == "plan"
            else 0,
        }
    if arm == "plain":
        rows = train(model, optimizer, NUM_STEPS)
        predicted_bytes = predicted_seconds = None
    else:
        plan = Plan.load(plan_file)
        if arm == "late":
            plan = without_reading_ahead(plan)
        with memwall.fit(model, optimizer, plan=plan, disk=directory):
            rows = train(model, optimizer, NUM_STEPS)
        predicted_bytes, predicted_seconds = plan.forecast.peak.process_bytes, plan.forecast.step_seconds
    peak_bytes = process_peak_bytes()
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().numpy().data)
    return {
        "rows": rows[NUM_WARM:],
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": predicted_bytes,
        "predicted_step_seconds": predicted_seconds,
        "sha256": weights.hexdigest(),
    }


def state_of(plan: Plan) -> OptimizerPlacement:
    """Where the plan has the optimizer's state."""
    found = [action for action in plan.actions if isinstance(action, OptimizerPlacement)]
    if not found:
        raise SystemExit("the plan keeps the optimizer's state in memory: the disk is too slow for it, or too fast")
    return found[0]


def without_reading_ahead(plan: Plan) -> Plan:
    """The same plan, but for that."""
    state = state_of(plan)
    actions = tuple(
        msgspec.structs.replace(action, ahead=msgspec.UNSET) if action is state else action for action in plan.actions
    )
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, actions=actions))


def in_a_process(arm: str, num_layers: int, directory: str, budget_bytes: int = 1 << 40) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", arm, str(num_layers), directory, str(budget_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3


def measure(num_layers: int, num_rounds: int, directory: str) -> dict[str, Any]:
    """All arms, interleaved."""
    probe = in_a_process("probe", num_layers, directory)
    smallest, plain = probe["smallest_bytes"], probe["plain_bytes"]
    budget_bytes = int(smallest + _BUDGET_SHARE * (plain - smallest))
    planned = in_a_process("plan", num_layers, directory, budget_bytes)
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for number in range(num_rounds):
        for arm in ARMS if number % 2 == 0 else ARMS[::-1]:
            runs[arm].append(in_a_process(arm, num_layers, directory))
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    ratios = {
        name: [
            statistics.median(row[name] for row in ahead["rows"]) / statistics.median(row[name] for row in late["rows"])
            for ahead, late in zip(runs["ahead"], runs["late"], strict=True)
        ]
        for name in ("step_seconds", "optimizer_seconds")
    }
    return {
        "num_layers": num_layers,
        "num_rounds": num_rounds,
        "budget_bytes": budget_bytes,
        "ahead_bytes": planned["ahead_bytes"],
        "arms": {
            arm: {
                "step_seconds": quartiles([row["step_seconds"] for run in found for row in run["rows"]]),
                "optimizer_seconds": quartiles([row["optimizer_seconds"] for run in found for row in run["rows"]]),
                "peak_bytes": max(run["peak_bytes"] for run in found),
                "predicted_peak_bytes": found[0]["predicted_peak_bytes"],
                "predicted_step_seconds": found[0]["predicted_step_seconds"],
            }
            for arm, found in runs.items()
        },
        "step_time_ratios_ahead_to_late": ratios["step_seconds"],
        "optimizer_time_ratios_ahead_to_late": ratios["optimizer_seconds"],
        "has_same_weights": len({run["sha256"] for found in runs.values() for run in found}) == 1,
    }


def show(result: dict[str, Any]) -> None:
    print(
        f"budget {result['budget_bytes'] / 2**20:,.0f} MiB, {result['ahead_bytes'] / 2**20:,.0f} MiB read in backward; "
        f"same weights: {'yes' if result['has_same_weights'] else 'NO'}"
    )
    for arm, found in result["arms"].items():
        step, own = found["step_seconds"], found["optimizer_seconds"]
        print(
            f"{arm}: step {step[1]:.3f} s ({step[0]:.3f}-{step[2]:.3f}), optimizer {own[1]:.3f} s "
            f"({own[0]:.3f}-{own[2]:.3f}), peak {found['peak_bytes'] / 2**20:,.0f} MiB"
        )
    for name in ("step", "optimizer"):
        low, middle, high = quartiles(result[f"{name}_time_ratios_ahead_to_late"])
        print(f"{name}, ahead to late: {middle:.2f} ({low:.2f}-{high:.2f})")


def holds(result: dict[str, Any]) -> bool:
    """Whether reading ahead made the optimizer's part shorter, within the budget and to the same weights."""
    is_kept = all(result["arms"][arm]["peak_bytes"] <= result["budget_bytes"] for arm in ("late", "ahead"))
    is_shorter = statistics.median(result["optimizer_time_ratios_ahead_to_late"]) < 1.0
    return result["has_same_weights"] and is_kept and is_shorter


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="optimizer state read during backward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="a small model, one round; nothing is written")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        arm, num_layers, directory, budget_bytes = options.child
        print(json.dumps(run_child(arm, int(num_layers), directory, int(budget_bytes))))
        return 0
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        num_layers, num_rounds = (2, 1) if options.quick else (NUM_LAYERS, options.rounds)
        result = measure(num_layers, num_rounds, directory)
    show(result)
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.state-ahead/1"}
        OUTPUT.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    return 0 if holds(result) else 1


if __name__ == "__main__":
    sys.exit(main())
