"""The claim: where fused kernels are allowed, a language model trains under budgets that no plan without them can meet.

    python benchmarks/fused_kernels.py [--rounds 3] [--disk DIR]
    python benchmarks/fused_kernels.py --quick            # one round; nothing is written

A Llama of transformers with AdamW on this CPU, where a kernel is its plain reference: bytes are what is shown, not the
speed of kernels. Budgets are shares of the plain run's peak. Each arm has a process of its own in each round; rounds
alternate their order. Bytes are the kernel's (VmHWM). Weights are compared with the plain run's: the largest difference
of a parameter over its norm. Writes results/cpu/fused_kernels.json.
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
from torch import Tensor, nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.meter import process_peak_bytes, reset_process_peak

OUTPUT = Path(__file__).parent / "results" / "cpu" / "fused_kernels.json"
BATCH, TOKENS, NUM_STEPS = 4, 256, 6
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}
SHARES = (0.75, 0.62)
MOST_DIFFERENCE = 1e-3
_TIMEOUT_S = 600.0


def make() -> nn.Module:
    """The model, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**SHAPE, use_cache=False))
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Seconds of each step."""
    seconds = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens: Tensor = torch.randint(SHAPE["vocab_size"], (BATCH, TOKENS), generator=generator)
        begin = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return seconds


def run_child(arm: str, budget_bytes: int, directory: str) -> dict[str, Any]:
    """One arm in this process: plain, memwall, or memwall with kernels."""
    torch.set_num_threads(1)
    model, weights = make(), Path(directory) / "plain.pt"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arm == "plain":
        train(model, optimizer, range(1))
        reset_process_peak()
        seconds = train(model, optimizer, range(1, NUM_STEPS))
        torch.save([parameter.detach() for parameter in model.parameters()], weights)
        return {"peak_bytes": process_peak_bytes(), "step_seconds": statistics.median(seconds)}
    allow = ("kernels",) if arm == "kernels" else ()
    session = memwall.fit(model, optimizer, budget=budget_bytes, allow=allow, disk=directory)
    try:
        with session:
            seconds = train(model, optimizer, range(NUM_STEPS))[1:]
            peak_bytes = process_peak_bytes()
    except InfeasibleError as error:
        return {"smallest_feasible_bytes": error.smallest_feasible_bytes}
    assert session.plan is not None
    forecast = session.plan.forecast
    differences = [
        float((ours.detach() - own).norm() / own.norm())
        for ours, own in zip(model.parameters(), torch.load(weights), strict=True)
    ]
    return {
        "peak_bytes": peak_bytes,
        "step_seconds": statistics.median(seconds),
        "predicted_peak_bytes": forecast.phases["steady_step"].process_bytes,
        "steady_peak_bytes": session.measured.peak_bytes,
        "weight_difference_ratio": max(differences),
        "actions": sorted({type(action).__name__ for action in forecast.actions}),
    }


def in_a_process(arm: str, budget_bytes: int, directory: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", arm, str(budget_bytes), directory]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{arm}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(num_rounds: int, directory: str) -> dict[str, Any]:
    """All arms, interleaved; the plain one first, whose weights the others are compared with."""
    plain = in_a_process("plain", 0, directory)
    cells = [(arm, int(share * plain["peak_bytes"])) for share in SHARES for arm in ("memwall", "kernels")]
    runs: list[list[dict[str, Any]]] = [[] for _ in cells]
    plain_runs = [plain]
    for number in range(num_rounds):
        order = range(len(cells)) if number % 2 == 0 else reversed(range(len(cells)))
        for cell in order:
            runs[cell].append(in_a_process(*cells[cell], directory))
        plain_runs.append(in_a_process("plain", 0, directory))
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    rows = [{"arm": "plain", **_highest(plain_runs)}]
    rows += [
        {"arm": arm, "budget_bytes": budget_bytes, **_highest(found)}
        for (arm, budget_bytes), found in zip(cells, runs, strict=True)
    ]
    return {"batch": BATCH, "num_tokens": TOKENS, "num_steps": NUM_STEPS, "num_rounds": num_rounds, "rows": rows}


def _highest(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several runs of an arm: the highest of each figure, and the steps' seconds in order."""
    row: dict[str, Any] = {name: max(run[name] for run in runs) for name in runs[0] if name != "actions"}
    if "actions" in runs[0]:
        row["actions"] = runs[0]["actions"]
    if "step_seconds" in row:
        row["step_seconds"] = sorted(run["step_seconds"] for run in runs)
    return row


def show(row: dict[str, Any]) -> None:
    mib = {name: f"{value / 2**20:,.0f} MiB" for name, value in row.items() if name.endswith("_bytes")}
    line = row["arm"] + (f" in {mib['budget_bytes']}" if "budget_bytes" in row else "")
    if "smallest_feasible_bytes" in row:
        print(f"{line}: no plan; the smallest budget is {mib['smallest_feasible_bytes']}")
        return
    line += f": peak {mib['peak_bytes']}, step {statistics.median(row['step_seconds']):.3f} s"
    if "budget_bytes" in row:
        line += (
            f"; steady peak {mib['steady_peak_bytes']}, predicted {mib['predicted_peak_bytes']}; weights differ by "
            f"{row['weight_difference_ratio']:.0e}; {', '.join(row['actions'])}"
        )
    print(line)


def holds(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether every budget was kept, weights are the plain run's but for rounding, and only kernels fit the least."""
    planned = [row for row in rows if "budget_bytes" in row and "peak_bytes" in row]
    is_kept = all(row["peak_bytes"] <= row["budget_bytes"] for row in planned)
    is_same = all(row["weight_difference_ratio"] <= MOST_DIFFERENCE for row in planned)
    without, with_kernels = rows[-2:]
    return is_kept and is_same and "peak_bytes" not in without and "peak_bytes" in with_kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 if a claim does not hold."""
    parser = argparse.ArgumentParser(description="a language model with and without fused kernels, under budgets")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--quick", action="store_true", help="one round; nothing is written")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        arm, budget_bytes, directory = options.child
        print(json.dumps(run_child(arm, int(budget_bytes), directory)))
        return 0
    with tempfile.TemporaryDirectory(dir=options.disk) as directory:
        result = measure(1 if options.quick else options.rounds, directory)
    for row in result["rows"]:
        show(row)
    if not options.quick:
        facts = {**provenance(), "schema": "memwall.benchmarks.fused-kernels/1"}
        OUTPUT.write_text(json.dumps({**facts, **result}, indent=1) + "\n")
    return 0 if holds(result["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main())
