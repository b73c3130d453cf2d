"""Measures what memwall costs a script that fits anyway: before its first line, until its plan stands, and per step.

    python benchmarks/start_up.py [--rounds N] [tiny] [gpt_100m] [steady] [commands]

Two scripts, a tiny network and a GPT of 100 million parameters, in three arms that take turns: plain; `memwall run`,
which leaves them alone; and `memwall run --report`, which records their first step and plans, for nothing. They print
their own processor seconds, which the work of other processes does not add to, and their resident bytes; torch's
imports are in all arms. Then steps of one model under a plan of `memwall.fit` that does nothing, in turns two with and
two without what it has hooked, of which the second ones are timed, since to take hooks away warms caches for the first:
median and quartiles of the differences within neighbours. (Two equal models differ by up to 1 % of a step, by where
their tensors lie.) Then the start of three commands beside Python's own. Writes
results/cpu/start_up.json.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from workloads import Block

import memwall

OUTPUT = Path(__file__).parent / "results" / "cpu" / "start_up.json"
_STEPS = {"tiny": 300, "gpt_100m": 4}
_ARMS = {
    "plain": [],
    "memwall": ["-m", "memwall", "run", "--budget", "16GiB"],
    "planned": ["-m", "memwall", "run", "--budget", "16GiB", "--report", "run.json"],
}
_COMMANDS = {
    "python": ["-c", "pass"],
    "version": ["-m", "memwall", "--version"],
    "help": ["-m", "memwall", "--help"],
    "help_of_run": ["-m", "memwall", "run", "--help"],
    "import_torch": ["-c", "import torch"],
    "doctor": ["-m", "memwall", "doctor"],
}
_SCRIPT = """
import json, time
import torch
from torch import nn
def resident(): return int(open("/proc/self/statm").read().split()[1]) * {page_bytes}
times, sizes = [time.process_time()], [resident()]
torch.manual_seed(0)
{model}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
times.append(time.process_time())
for _ in range({steps}):
    loss = model(*batch()).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append(time.process_time())
sizes.append(resident())
print(json.dumps({{"times": times, "sizes": sizes, "parameters": sum(p.numel() for p in model.parameters())}}))
"""
_MODELS = {
    "tiny": """
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
def batch(): return (torch.randn(16, 64),)
""",
    "gpt_100m": """
layer = nn.TransformerEncoderLayer(768, 12, 3072, 0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(19_500, 768), nn.TransformerEncoder(layer, 12, enable_nested_tensor=False))
def batch(): return (torch.randint(19_500, (2, 64)),)
""",
}


def run(script: str, folder: Path, arm: str) -> dict[str, Any]:
    """Returns what a script printed of itself."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, *_ARMS[arm], "train.py"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    times = found["times"]
    return {
        "first_line_cpu_seconds": times[0],
        "first_step_cpu_seconds": times[2] - times[1],
        "second_step_cpu_seconds": times[3] - times[2],
        "later_step_cpu_seconds": statistics.median(b - a for a, b in pairwise(times[3:])),
        "first_line_bytes": found["sizes"][0],
        "end_bytes": found["sizes"][1],
        "num_parameters": found["parameters"],
    }


def steady(num_steps: int) -> dict[str, Any]:
    """Returns what a plan that does nothing takes of a step, of a small GPT with four layers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(*[Block(128, 4, is_causal=True) for _ in range(4)], nn.Linear(128, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(4, 128, 128)
    seconds: dict[str, list[float]] = {"planned": [], "plain": []}
    with memwall.fit(model, optimizer, budget="16GiB"):
        for number in range(num_steps + 5):
            for arm in ("planned", "plain") if number % 2 else ("plain", "planned"):
                with _unhooked(model, optimizer) if arm == "plain" and number else nullcontext():
                    _step(model, optimizer, batch)
                    seconds[arm].append(_step(model, optimizer, batch))
    pairs = list(zip(seconds["planned"][5:], seconds["plain"][5:], strict=True))
    plain = statistics.median(b for _, b in pairs)
    first, added, third = statistics.quantiles((a - b for a, b in pairs), n=4)
    return {
        "num_steps": num_steps,
        "step_cpu_seconds": plain,
        "added_cpu_seconds": added,
        "added_to_plain_ratio": added / plain,
        "added_to_plain_ratio_quartiles": [first / plain, third / plain],
    }


@contextmanager
def _unhooked(model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
    """Takes every hook of a model and its optimizer away for a while, and what stands in place of a forward."""
    owners = [*(vars(module) for module in model.modules()), vars(optimizer), vars(sys.modules[Optimizer.__module__])]
    hooks = [value for owner in owners for name, value in owner.items() if name.endswith("_hooks") and value]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    forwards = [(owner, owner.pop("forward")) for owner in owners if "forward" in owner]
    try:
        yield
    finally:
        for owner, forward in forwards:
            owner["forward"] = forward
        for each, held in zip(hooks, kept, strict=True):
            each.update(held)


def _step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> float:
    begin = time.process_time()
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.process_time() - begin


def commands(num_rounds: int) -> dict[str, Any]:
    """Returns the processor seconds of whole processes."""
    seconds: dict[str, list[float]] = {name: [] for name in _COMMANDS}
    for _ in range(num_rounds):
        for name, arguments in _COMMANDS.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {f"{name}_cpu_seconds": statistics.median(each) for name, each in seconds.items()}


def table(record: dict[str, Any]) -> list[str]:
    """Returns the rows of the table in docs/guarantees.md: what each arm takes more than the plain script."""
    rows = []
    names = {"tiny": "4,680 parameters", "gpt_100m": "100 million parameters"}
    for name, script in ((name, script) for name, script in names.items() if name in record):
        for arm, how in {"memwall": "left alone", "planned": "planned for nothing"}.items():
            plain, found = record[name]["plain"], record[name][arm]
            seconds = [
                f"{found[f'{part}_cpu_seconds'] - plain[f'{part}_cpu_seconds']:+.2f} s"
                for part in ("first_line", "first_step", "second_step")
            ]
            # What malloc keeps of a large step when it has ended differs by more than this between two plain runs.
            size = f"{(found['end_bytes'] - plain['end_bytes']) / 2**20:+.1f} MiB" if name == "tiny" else "-"
            rows.append(f"| {script}, {how} | {' | '.join(seconds)} | {size} |")
    return rows


def arms_of(name: str, num_rounds: int) -> dict[str, Any]:
    """Returns the medians of each arm of a script."""
    script = _SCRIPT.format(model=_MODELS[name], steps=_STEPS[name], page_bytes=os.sysconf("SC_PAGE_SIZE"))
    arms: dict[str, list[dict[str, Any]]] = {arm: [] for arm in _ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(num_rounds):
            for arm, runs in arms.items():
                runs.append(run(script, Path(folder), arm))
    return {arm: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for arm, runs in arms.items()}


def main() -> None:
    """Measures the parts that are asked for, and writes them beside the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=450, help="with, and as many without, what a plan has hooked")
    parts = (*_MODELS, "steady", "commands")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="by default all of them")
    args = parser.parse_args()
    for part in args.parts or parts:
        if part == "steady":
            found = steady(args.steps)
        else:
            found = commands(args.rounds) if part == "commands" else arms_of(part, args.rounds)
            found["num_rounds"] = args.rounds
        print(f"{part}: {json.dumps(found)}", flush=True)
        record = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {}
        record |= {"tag": "cpu-measured", "num_threads": os.environ.get("OMP_NUM_THREADS"), part: found}
        OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
