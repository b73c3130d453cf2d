"""Measures how soon a run with --checkpoint is gone after SIGTERM, alone and beside the work of other processes.

    python benchmarks/ending_time.py [--runs N] [--beside N]

The run trains a transformer of 27 million parameters, whose step takes half a second of a core. SIGTERM comes at a
random instant of a step; then its process is waited for, and the last commit is read. Beside so many processes that
compute for nothing (by default 16) step, commit and Python's own end take many times as long. Writes
results/cpu/ending_time.json.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memwall.checkpoint.files import read_summary

OUTPUT = Path(__file__).parent / "results" / "cpu" / "ending_time.json"
_NUM_STEPS_ALONE, _NUM_STEPS_BESIDE = 2, 2
"""Steps before others begin to work, and those beside them before the signal."""
_SCRIPT = """
import torch
from torch import nn
import memwall
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(16_000, 512), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in memwall.steps(100_000):
    loss = model(torch.randint(16_000, (2, 64))).float().pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("step", flush=True)
"""


def ended(folder: Path, draw: random.Random, num_beside: int) -> dict[str, Any]:
    """Returns how long one run was there after SIGTERM, and how many of its steps were not committed."""
    (folder / "train.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "memwall", "run", "--budget", "8GiB", "--checkpoint", "kept", "train.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    _steps(run, _NUM_STEPS_ALONE)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_beside)]
    try:
        step_seconds = _steps(run, _NUM_STEPS_BESIDE)
        time.sleep(draw.uniform(0, step_seconds))
        told = time.monotonic()
        run.send_signal(signal.SIGTERM)
        printed, said = run.communicate()
        seconds = time.monotonic() - told
    finally:
        for each in busy:
            each.kill()
            each.wait()
    if run.returncode != 128 + signal.SIGTERM:
        raise SystemExit(f"the run ended with status {run.returncode}: {said}")
    num_steps = _NUM_STEPS_ALONE + _NUM_STEPS_BESIDE + printed.count("step\n")
    num_lost = num_steps - read_summary(folder / "kept").step
    return {"seconds": seconds, "step_seconds": step_seconds, "num_steps_lost": num_lost}


def _steps(run: "subprocess.Popen[str]", number: int) -> float:
    """Waits for so many steps of a run; returns the seconds of the last one."""
    assert run.stdout is not None
    times = [time.monotonic()]
    while len(times) <= number:
        if not run.stdout.readline():
            raise SystemExit(f"the run ended early: {run.communicate()[1]}")
        times.append(time.monotonic())
    return times[-1] - times[-2]


def arm(num_runs: int, num_beside: int) -> dict[str, Any]:
    """Returns what came of so many runs beside so many busy processes."""
    found = []
    for number in range(num_runs):
        with tempfile.TemporaryDirectory() as folder:
            found.append(ended(Path(folder), random.Random(number), num_beside))
            print(num_beside, found[-1], flush=True)
    seconds = [one["seconds"] for one in found]
    return {
        "num_beside": num_beside,
        "num_runs": num_runs,
        "step_seconds": statistics.median(one["step_seconds"] for one in found),
        "median_seconds": statistics.median(seconds),
        "most_seconds": max(seconds),
        "num_steps_lost": sum(one["num_steps_lost"] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--beside", type=int, default=16)
    args = parser.parse_args()
    arms = {"alone": arm(args.runs, 0), "beside_others": arm(args.runs, args.beside)}
    record = {"tag": "cpu-measured", "num_cores": os.cpu_count(), **arms}
    OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
