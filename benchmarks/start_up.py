"""Measures what `memwall run` costs before a script's first line, until its first step, and until its plan stands.

    python benchmarks/start_up.py [--rounds N]

Two scripts, each plain and under a budget that asks for nothing, in turns: a tiny network, and a GPT of 100 million
parameters. They print their own processor seconds, which the work of other processes does not add to, and their
resident bytes; torch's imports are in both arms. Writes results/cpu/start_up.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).parent / "results" / "cpu" / "start_up.json"
_STEPS = 3
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


def run(script: str, folder: Path, *, planned: bool) -> dict[str, Any]:
    """Returns what a script printed of itself."""
    (folder / "train.py").write_text(script)
    command = [sys.executable, "train.py"]
    if planned:
        command = [sys.executable, "-m", "memwall", "run", "--budget", "16GiB", "train.py"]
    done = subprocess.run(command, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with status {done.returncode}: {done.stderr.strip()}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    times = found["times"]
    return {
        "first_line_cpu_seconds": times[0],
        "first_step_cpu_seconds": times[2] - times[1],
        "second_step_cpu_seconds": times[3] - times[2],
        "first_line_bytes": found["sizes"][0],
        "end_bytes": found["sizes"][1],
        "num_parameters": found["parameters"],
    }


def main() -> None:
    """Prints what memwall adds to each figure, and writes the medians of both arms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    record: dict[str, Any] = {
        "tag": "cpu-measured",
        "num_rounds": rounds,
        "num_threads": os.environ.get("OMP_NUM_THREADS"),
    }
    for name, model in _MODELS.items():
        script = _SCRIPT.format(model=model, steps=_STEPS, page_bytes=os.sysconf("SC_PAGE_SIZE"))
        arms: dict[str, list[dict[str, Any]]] = {"plain": [], "memwall": []}
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(rounds):
                for arm, runs in arms.items():
                    runs.append(run(script, Path(folder), planned=arm == "memwall"))
        medians = {
            arm: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for arm, runs in arms.items()
        }
        record[name] = medians
        added = {key: value - medians["plain"][key] for key, value in medians["memwall"].items()}
        print(
            f"{name}: before the first line {added['first_line_cpu_seconds']:+.2f} CPU s, "
            f"{added['first_line_bytes'] / 2**20:+.1f} MiB; to the first step (recording) "
            f"{added['first_step_cpu_seconds']:+.2f} s; to the second (planning) "
            f"{added['second_step_cpu_seconds']:+.2f} s; {added['end_bytes'] / 2**20:+.1f} MiB at the end",
            flush=True,
        )
    OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
