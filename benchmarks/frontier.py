"""The claim: under a memory cap memwall trains at least 8 times the parameters that plain PyTorch trains.

    python benchmarks/frontier.py [--caps 1 2 4] [--disk DIR] [--disk-gb 15] [--goal 8] [--deepspeed PYTHON] [--quick]

A GPT of one width, AdamW, float32, one sequence of 512 tokens, is made deeper until the kernel kills it: plainly, with
torch's checkpointing of every block, under DeepSpeed's ZeRO-3 with NVMe, and with memwall moving parameters, gradients
and optimizer state to disk and recomputing blocks. Plain PyTorch is also tried at memwall's size with swap of the
kernel. Each trial is a process in a memory control group of its own. The second goal is memwall's step: at most 1.25
times what its arithmetic and its bytes need, at the speed that the disk keeps up. Writes results/cpu/frontier.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from cgroup import CapUnavailable, own_group
from deepspeed_process import DEFAULT_PYTHON, why_no_deepspeed
from disk_bound import DiskSpeed, bound_seconds, sustained
from frontier_trials import (
    DISK_BYTES_PER_PARAMETER,
    Trial,
    best,
    deepspeed_guess,
    frontier,
    layer_parameters,
    layers_for,
    layers_on_disk,
    run,
    run_with_swap,
)
from revision import git
from swap_file import SwapUnavailable, swap_file

__all__ = ["holds", "main"]

ROOT = Path(__file__).resolve().parent.parent
_MOST_TIMES_BOUND = 1.25
# Of plain PyTorch: the process before the first step, and for each token and width of a layer what backward needs.
_PLAIN_BASE_BYTES, _SAVED_BYTES_PER_TOKEN_AND_WIDTH = 350 << 20, 50


def beyond(cap_bytes: int, goal: int, most: int, options: argparse.Namespace) -> list[Trial]:
    """memwall's trials: the goal, then in large strides, each a long run, until it fails or the disk is full."""
    trials = []
    layers = min(goal, most)
    while True:
        trials.append(run("memwall", layers, cap_bytes, options))
        if not trials[-1].has_trained and len(trials) == 1 and layers > 1:
            return frontier("memwall", cap_bytes, layers // 2, options, most=layers - 1)
        following = min(most, layers + max(1, round(layers * options.stride)))
        if not trials[-1].has_trained or following == layers or options.stride == 0:
            return trials
        layers = following


def case(cap_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One cap."""
    guess = max(1, (cap_bytes - _PLAIN_BASE_BYTES) // _plain_layer_bytes(options))
    most = layers_on_disk(options.width, int(options.disk_gb * 1e9))
    arms = {"plain": frontier("plain", cap_bytes, guess, options)}
    plain = best(arms["plain"])
    if plain is None:
        raise RuntimeError(f"not even one layer trains plainly below {cap_bytes} bytes; raise --caps or lower --width")
    arms["checkpoint"] = frontier("checkpoint", cap_bytes, plain.layers + 1, options)
    no_deepspeed = why_no_deepspeed(options.deepspeed)
    if no_deepspeed is None:
        arms["deepspeed"] = frontier("deepspeed", cap_bytes, deepspeed_guess(cap_bytes, options.width), options)
    same = run("memwall", plain.layers, cap_bytes, options)
    goal = min(most, layers_for(options.goal, plain, options.width))
    speeds = [sustained(options.disk, goal * layer_parameters(options.width) * DISK_BYTES_PER_PARAMETER)]
    arms["memwall"] = beyond(cap_bytes, goal, most, options)
    ours = best(arms["memwall"])
    speeds.append(sustained(options.disk, speeds[0].file_bytes if ours is None else ours.steps[-1]["disk_bytes"]))
    found: dict[str, Any] = {
        "cap_bytes": cap_bytes,
        "most_layers_on_disk": most,
        "disk": {
            name: [getattr(speed, name) for speed in speeds]
            for name in ("file_bytes", "read_bytes_per_second", "write_bytes_per_second")
        },
        "has_same_losses": [step["loss"] for step in same.steps] == [step["loss"] for step in plain.steps],
        "memwall_at_plains_size": _summary(same),
        "arms": {
            arm: {
                "largest": _summary(best(trials)),
                "trials": [(t.layers, t.has_trained, t.peak_bytes, t.reason) for t in trials],
            }
            for arm, trials in arms.items()
        },
        "swap": _swap(goal if ours is None else ours.layers, cap_bytes, options),
        "num_times_plain": ours.num_parameters / plain.num_parameters if ours is not None else 0.0,
        "is_limited_by_disk": ours is not None and ours.layers == most,
    }
    if no_deepspeed is not None:
        found["arms"]["deepspeed"] = {"not_run": no_deepspeed}
    if ours is not None:
        found["bound"] = _bound(ours, best(arms["checkpoint"]) or plain, speeds)
    return found | {"holds": holds(found, options.goal)}


def holds(row: dict[str, Any], num_times: float) -> dict[str, bool]:
    """Which goals a cap's row reaches."""
    return {
        "has_same_losses": row["has_same_losses"],
        "has_parameters": row["num_times_plain"] >= num_times,
        "is_near_bound": "bound" in row
        and row["bound"]["is_plausible"]
        and row["bound"]["num_times_bound"] <= _MOST_TIMES_BOUND,
    }


def _swap(layers: int, cap_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Plain PyTorch at this depth with as much swap as it needs, until the time is over."""
    swap_bytes = max(0, layers * _plain_layer_bytes(options) + _PLAIN_BASE_BYTES - cap_bytes) + (256 << 20)
    if swap_bytes > options.disk_gb * 1e9:
        return {"not_run": f"{swap_bytes} bytes of swap are needed, which is more than --disk-gb"}
    try:
        with swap_file(options.disk, swap_bytes):
            trial = run_with_swap(layers, cap_bytes, options.swap_seconds, options)
    except SwapUnavailable as reason:
        return {"not_run": str(reason)}
    return {
        "layers": layers,
        "swap_bytes": swap_bytes,
        "limit_seconds": options.swap_seconds,
        "is_built": trial.num_parameters > 0,
        "has_trained": trial.has_trained,
        "reason": trial.reason,
        "build_seconds": trial.build_seconds,
        "step_seconds": [sum(step["phase_seconds"]) for step in trial.steps],
    }


def _plain_layer_bytes(options: argparse.Namespace) -> int:
    """What a layer takes of plain PyTorch's peak, about."""
    saved_bytes = _SAVED_BYTES_PER_TOKEN_AND_WIDTH * int(options.tokens) * int(options.width)
    return DISK_BYTES_PER_PARAMETER * layer_parameters(options.width) + saved_bytes


def _bound(ours: Trial, computed: Trial, speeds: Sequence[DiskSpeed]) -> dict[str, Any]:
    """The step beside what its bytes need of the disk and its arithmetic of the cores, as a smaller model shows it."""
    last, scale = ours.steps[-1], ours.layers / computed.layers
    compute = [seconds * scale for seconds in computed.steps[-1]["phase_seconds"]]
    read = statistics.mean(speed.read_bytes_per_second for speed in speeds)
    write = statistics.mean(speed.write_bytes_per_second for speed in speeds)
    least = bound_seconds(compute, last["read_bytes"], last["written_bytes"], read, write)
    seconds = sum(last["phase_seconds"])
    return {
        "step_seconds": seconds,
        "compute_seconds": compute,
        "compute_is_scaled_from_layers": computed.layers,
        "disk_seconds": sum(last["read_bytes"]) / read + sum(last["written_bytes"]) / write,
        "bound_seconds": least,
        "num_times_bound": seconds / least,
        # Where other work takes turns on the machine, the arms do not see the same one.
        "is_plausible": seconds >= 0.95 * least,
        "read_bytes_per_parameter": sum(last["read_bytes"]) / ours.num_parameters,
        "written_bytes_per_parameter": sum(last["written_bytes"]) / ours.num_parameters,
    }


def _summary(trial: Trial | None) -> dict[str, Any] | None:
    if trial is None:
        return None
    last = trial.steps[-1]
    return {
        "layers": trial.layers,
        "num_parameters": trial.num_parameters,
        "peak_bytes": trial.peak_bytes,
        "build_seconds": trial.build_seconds,
        "step_seconds": [sum(step["phase_seconds"]) for step in trial.steps],
        "phase_seconds": last["phase_seconds"],
        "read_bytes": last["read_bytes"],
        "written_bytes": last["written_bytes"],
        "disk_bytes": last["disk_bytes"],
        "losses": [step["loss"] for step in trial.steps],
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="the largest GPT that trains under a memory cap")
    parser.add_argument("--caps", type=float, nargs="+", default=[1.0, 2.0, 4.0], help="in GiB")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--goal", type=int, default=8, help="times plain PyTorch's layers, tried first")
    parser.add_argument("--stride", type=float, default=0.5, help="by how much to go on from there; 0: not at all")
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--disk-gb", type=float, default=15.0, help="the most disk to use")
    parser.add_argument("--deepspeed", type=Path, default=DEFAULT_PYTHON, metavar="PYTHON", help="that has DeepSpeed")
    parser.add_argument("--swap-seconds", type=float, default=300.0, help="for plain PyTorch with swap")
    parser.add_argument("--quick", action="store_true", help="one small cap, a narrow model, two steps")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "frontier.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.caps, options.width, options.steps, options.stride = [0.5], 512, 2, 0.0
        options.swap_seconds = 10.0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all caps and writes the results.

    Returns:
        0 if every goal was reached under every cap, 1 if not, 2 if there is no cap to be had here.
    """
    options = _options(arguments)
    folder = tempfile.mkdtemp(prefix="memwall-frontier-", dir=options.disk)
    options.disk = folder
    rows: list[dict[str, Any]] = []
    try:
        version = own_group()[1]
        for cap in options.caps:
            rows.append(case(int(cap * 2**30), options))
            _write(rows, version, options)
    except CapUnavailable as reason:
        print(f"no cap can be enforced here: {reason}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder)
    return 0 if all(all(row["holds"].values()) for row in rows) else 1


def _command(options: argparse.Namespace) -> str:
    """What measures this again, on any machine."""
    names = ("width", "tokens", "steps", "threads", "goal", "stride", "disk_gb", "swap_seconds")
    settings = [f"--{name.replace('_', '-')} {getattr(options, name):g}" for name in names]
    return f"python benchmarks/frontier.py --caps {' '.join(f'{cap:g}' for cap in options.caps)} {' '.join(settings)}"


def _write(rows: list[dict[str, Any]], cgroup_version: int, options: argparse.Namespace) -> None:
    """What is measured so far: a cap takes from minutes to an hour."""
    result = {
        "schema": "memwall.bench-frontier/1",
        "kind": "cpu-measured",
        "command": _command(options),
        "commit": git("rev-parse", "HEAD"),
        "is_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"torch": metadata.version("torch"), "python": platform.python_version()},
        "device": {"num_cores": os.cpu_count(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())},
        "load_at_the_end": os.getloadavg(),
        "meter": f"cgroup v{cgroup_version}: peak of the group with page cache; swap off except where it is the arm",
        "model": {
            "width": options.width,
            "tokens": options.tokens,
            "batch": 1,
            "optimizer": "AdamW",
            "dtype": "float32",
        },
        "num_threads": options.threads,
        "num_steps": options.steps,
        "goal": options.goal,
        "most_times_bound": _MOST_TIMES_BOUND,
        "disk_limit_bytes": int(options.disk_gb * 1e9),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
