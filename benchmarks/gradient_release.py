"""Steps within backward: the smallest budget with gradients released and without, measured here, planned for devices.

    python benchmarks/gradient_release.py [--rounds 1]

A language model that is mostly weights is fine-tuned by a plain loop (no accumulation, no clipping) with AdamW. On this
machine's CPU, where nothing may be written to the disk, the smallest budget is asked for with the technique and without
it; the model then trains under each, beside plain PyTorch, in turns, in processes of their own: peak, median step and a
digest of the weights. For devices that are not here (simulated) the same is asked of a model of 1.2 billion parameters
in bfloat16 and in float32, without host memory below the device. Writes results/cpu/gradient_release.json.

Ends with status 1 where weights differ, a run passes its budget, or the smallest budget is less than 5 % smaller.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from knob_report import provenance
from torch import Tensor, nn

import memwall
from memwall.errors import InfeasibleError
from memwall.integrations.spec_trace import device_run_of_spec
from memwall.machine.hardware import hardware_named
from memwall.machine.meter import process_peak_bytes, reset_process_peak
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.settings import Settings

OUTPUT = Path(__file__).parent / "results" / "cpu" / "gradient_release.json"
DEVICES, DTYPES = ("rtx-4090", "h100-80gb"), ("bfloat16", "float32")
NUM_STEPS, MIB = 6, 1 << 20
ALLOWED = ("gradient-release",)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """Blocks without attention, between an embedding and a head that is tied to it."""

    def __init__(self, width: int, num_blocks: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1) * 0.05, tokens.roll(1, 1).flatten())


def digests(model: nn.Module) -> dict[str, str]:
    """Returns a digest of each weight."""
    return {name: hashlib.sha256(value.numpy()).hexdigest() for name, value in model.state_dict().items()}


def train(budget_bytes: int, allow: tuple[str, ...]) -> dict[str, Any]:
    """Trains under a budget, or plainly under none; returns peak, step and digest, or the smallest budget."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = Model(768, 12, 8192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = digests(model)
    seconds: list[float] = []
    peaks: list[int] = []

    def run() -> None:
        for _ in range(NUM_STEPS):
            reset_process_peak()
            begin = time.perf_counter()
            model(torch.randint(0, 8192, (2, 64))).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - begin)
            peaks.append(process_peak_bytes())

    try:
        if budget_bytes:
            with memwall.fit(model, optimizer, budget=budget_bytes, no_disk=True, allow=allow) as session:
                run()
                assert session.plan is not None
                kinds = [str(action.__struct_config__.tag) for action in session.plan.actions]
                foreseen_bytes = session.plan.forecast.steady_process_bytes
        else:
            run()
            kinds, foreseen_bytes = [], None
    except InfeasibleError as error:
        return {"smallest_bytes": error.smallest_feasible_bytes}
    after = digests(model)
    assert all(after[name] != digest for name, digest in before.items()), "a weight is not trained"
    return {
        "peak_bytes": max(peaks[1:]),
        "foreseen_bytes": foreseen_bytes,
        "step_seconds": statistics.median(seconds[2:]),
        "actions": kinds,
        "digest": hashlib.sha256("".join(after.values()).encode()).hexdigest(),
    }


def child(budget_bytes: int, *, has_technique: bool) -> dict[str, Any]:
    """Returns what `train` says in a process of its own."""
    options = [] if has_technique else ["--without"]
    command = [sys.executable, __file__, "--child", str(budget_bytes), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(num_rounds: int) -> list[dict[str, Any]]:
    """Returns one row for plain PyTorch, and one for the smallest budget with the technique and without."""
    # What a budget of nearly nothing is refused with is the smallest; a first step's own spread lies on top.
    budgets = {has: int(1.01 * child(400 * MIB, has_technique=has)["smallest_bytes"]) for has in (True, False)}
    arms = {"plain": (0, True), "released": (budgets[True], True), "without": (budgets[False], False)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for _ in range(num_rounds):
        for name, (budget_bytes, has) in arms.items():
            runs[name].append(child(budget_bytes, has_technique=has))
    return [
        {
            "arm": name,
            "budget_bytes": arms[name][0] or None,
            **found[0],
            "peak_bytes": max(one["peak_bytes"] for one in found),
            "step_seconds": statistics.median(one["step_seconds"] for one in found),
        }
        for name, found in runs.items()
        if "peak_bytes" in found[0]
    ]


def simulated(device: str, dtype: str) -> dict[str, Any]:
    """Returns the smallest budgets for a device."""
    hardware = hardware_named(device)
    workload = memwall.Workload(
        model=lambda: Model(2048, 34, 32000).to(getattr(torch, dtype)),
        batch=lambda: torch.randint(0, 32000, (1, 1024)),
        loss=lambda model, batch: model(batch),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-5),
    )
    trace = device_run_of_spec(workload, hardware, is_evaluated=False).training
    row: dict[str, Any] = {"tag": "simulated", "device": device, "dtype": dtype}
    for name, allow in (("released_bytes", ALLOWED), ("without_bytes", ())):
        settings = Settings(budget_bytes=1 << 40, hardware=hardware, allow=allow)
        row[name] = RecordingSearch(trace, settings).smallest_bytes()
    return {**row, "less_percent": round(100 * (1 - row["released_bytes"] / row["without_bytes"]), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--without", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        print(json.dumps(train(arguments.child, () if arguments.without else ALLOWED)))
        return 0
    devices = [simulated(device, dtype) for device in DEVICES for dtype in DTYPES]
    rows = measured(arguments.rounds)
    by_arm = {row["arm"]: row for row in rows}
    plain, released, without = (by_arm[name] for name in ("plain", "released", "without"))
    less_percent = round(100 * (1 - released["budget_bytes"] / without["budget_bytes"]), 1)
    result = {**provenance(), "schema": "memwall.benchmarks.gradient_release/1", "num_rounds": arguments.rounds}
    result |= {"less_percent": less_percent, "rows": rows, "devices": devices}
    OUTPUT.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print({key: value for key, value in row.items() if key != "digest"})
    for row in devices:
        print(row)
    is_kept = all(row["peak_bytes"] <= row["budget_bytes"] for row in (released, without))
    are_equal = plain["digest"] == released["digest"] == without["digest"]
    is_less = min(less_percent, *(row["less_percent"] for row in devices)) >= 5
    print(f"smallest budget {less_percent} % smaller; kept: {is_kept}; weights equal: {are_equal}")
    return int(not (is_kept and are_equal and is_less))


if __name__ == "__main__":
    sys.exit(main())
