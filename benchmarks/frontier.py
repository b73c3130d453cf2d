"""The claim: under a memory cap memwall trains at least 8 times the parameters that plain PyTorch trains.

    python benchmarks/frontier.py [--caps 1 2 4] [--disk DIR] [--disk-gb 15] [--goal 8] [--quick]

A GPT of one width, AdamW, float32, one sequence of 512 tokens, is made deeper until the kernel kills it: plainly, with
torch's checkpointing of every block, and with memwall moving parameters, gradients and optimizer state to disk and
recomputing blocks. Each trial is a process in a memory control group of its own. Writes results/cpu/frontier.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cgroup import CapUnavailable, memory_cap, own_group

from memwall.store.probe import probe_disk

__all__ = ["Trial", "bound_seconds", "largest", "layers_for", "layers_on_disk", "run"]

ROOT = Path(__file__).resolve().parent.parent
_PROBE_BYTES = 512 << 20
# Disk per parameter: itself, its gradient, two moments.
_DISK_BYTES_PER_PARAMETER = 16
_TIMEOUT_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size under one cap."""

    layers: int
    num_parameters: int
    has_trained: bool
    is_oom_killed: bool
    peak_bytes: int
    """Of the group: the process, and the page cache that it filled."""
    build_seconds: float
    steps: list[dict[str, Any]]
    """What the child printed after each step."""
    errors: str


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number for which `fits`, when it does for all smaller ones; 0 if there is none.

    Args:
        fits: asked for as few numbers as may be, near the guess first.
        guess: at least 1.
    """
    low, step = 0, 1
    high = guess if fits(guess) else None
    if high is None:
        high = guess
    else:
        low = guess
        while fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def layers_on_disk(width: int, disk_bytes: int) -> int:
    """How many layers of this width have room on disk with gradients and state."""
    return disk_bytes // (_DISK_BYTES_PER_PARAMETER * _layer_parameters(width))


def bound_seconds(
    compute_seconds: Sequence[float],
    read_bytes: Sequence[int],
    written_bytes: Sequence[int],
    read_bytes_per_second: float,
    write_bytes_per_second: float,
) -> float:
    """The least a step can take where each phase's transfers hide behind its arithmetic, and no other phase's.

    Args:
        compute_seconds: of forward, backward and step, as the other arguments.
        read_bytes: what a phase reads, over a link that either reads or writes.
        written_bytes: what it writes.
        read_bytes_per_second: of the disk.
        write_bytes_per_second: of the disk.
    """
    return sum(
        max(compute, read / read_bytes_per_second + written / write_bytes_per_second)
        for compute, read, written in zip(compute_seconds, read_bytes, written_bytes, strict=True)
    )


def run(arm: str, layers: int, cap_bytes: int, options: argparse.Namespace) -> Trial:
    """Trains a model of this depth under the cap."""
    command = [sys.executable, str(ROOT / "benchmarks" / "frontier_child.py"), "--arm", arm, "--layers", str(layers)]
    command += ["--width", str(options.width), "--tokens", str(options.tokens), "--steps", str(options.steps)]
    command += ["--threads", str(options.threads), "--disk", options.disk]
    with memory_cap(cap_bytes) as cap:
        done = cap.run(command, timeout_s=_TIMEOUT_S)
    head, *steps = [json.loads(line) for line in done.output.splitlines()] or [{}]
    trial = Trial(
        layers=layers,
        num_parameters=head.get("num_parameters", 0),
        has_trained=done.status == 0 and len(steps) == options.steps,
        is_oom_killed=done.is_oom_killed,
        peak_bytes=done.peak_bytes,
        build_seconds=head.get("build_seconds", 0.0),
        steps=steps,
        errors=done.errors[-1000:] if done.status else "",
    )
    seconds = [sum(step["phase_seconds"]) for step in steps]
    print(
        f"{cap_bytes / 2**30:g} GiB, {arm}, {layers} layers: {'trains' if trial.has_trained else 'does not'}, peak "
        f"{trial.peak_bytes / 2**20:.0f} MiB, steps {' '.join(f'{s:.1f}' for s in seconds)} s",
        file=sys.stderr,
    )
    if not trial.has_trained and not trial.is_oom_killed:
        raise RuntimeError(f"{arm} with {layers} layers ended with status {done.status}: {done.errors[-2000:]}")
    return trial


def frontier(arm: str, cap_bytes: int, guess: int, most: int, options: argparse.Namespace) -> list[Trial]:
    """All trials of an arm, by depth; no deeper than `most`."""
    trials: dict[int, Trial] = {}

    def fits(layers: int) -> bool:
        if layers > most:
            return False
        if layers not in trials:
            trials[layers] = run(arm, layers, cap_bytes, options)
        return trials[layers].has_trained

    largest(fits, max(1, min(guess, most)))
    return [trials[layers] for layers in sorted(trials)]


def beyond(cap_bytes: int, goal: int, most: int, options: argparse.Namespace) -> list[Trial]:
    """memwall's trials: the goal, then in large strides, each a long run, until it fails or the disk is full."""
    trials = []
    layers = min(goal, most)
    while True:
        trials.append(run("memwall", layers, cap_bytes, options))
        if not trials[-1].has_trained and len(trials) == 1 and layers > 1:
            return frontier("memwall", cap_bytes, layers // 2, layers - 1, options)
        following = min(most, layers + max(1, round(layers * options.stride)))
        if not trials[-1].has_trained or following == layers or options.stride == 0:
            return trials
        layers = following


def case(cap_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """One cap."""
    guess = max(1, int((cap_bytes - (350 << 20)) / (_DISK_BYTES_PER_PARAMETER * _layer_parameters(options.width))))
    most = layers_on_disk(options.width, int(options.disk_gb * 1e9))
    arms = {arm: frontier(arm, cap_bytes, guess, 10**6, options) for arm in ("plain", "checkpoint")}
    plain = _best(arms["plain"])
    if plain is None:
        raise RuntimeError(f"not even one layer trains plainly below {cap_bytes} bytes; raise --caps or lower --width")
    same = run("memwall", plain.layers, cap_bytes, options)
    probes = [probe_disk(options.disk, _PROBE_BYTES)]
    arms["memwall"] = beyond(cap_bytes, layers_for(options.goal, plain, options.width), most, options)
    probes.append(probe_disk(options.disk, _PROBE_BYTES))
    best = _best(arms["memwall"])
    found: dict[str, Any] = {
        "cap_bytes": cap_bytes,
        "most_layers_on_disk": most,
        "disk": {
            "read_bytes_per_second": [probe.read_bytes_per_second for probe in probes],
            "write_bytes_per_second": [probe.write_bytes_per_second for probe in probes],
        },
        "has_same_losses": [step["loss"] for step in same.steps] == [step["loss"] for step in plain.steps],
        "memwall_at_plains_size": _summary(same),
        "arms": {
            arm: {
                "largest": _summary(_best(trials)),
                "trials": [(t.layers, t.has_trained, t.peak_bytes) for t in trials],
            }
            for arm, trials in arms.items()
        },
        "num_times_plain": best.num_parameters / plain.num_parameters if best is not None else 0.0,
        "is_limited_by_disk": best is not None and best.layers == most,
    }
    if best is not None:
        found["bound"] = _bound(best, _best(arms["checkpoint"]) or plain, probes)
    return found


def _bound(best: Trial, computed: Trial, probes: Sequence[Any]) -> dict[str, Any]:
    """The step beside what its bytes need of the disk and its arithmetic of the cores, as a smaller model shows it."""
    last, scale = best.steps[-1], best.layers / computed.layers
    compute = [seconds * scale for seconds in computed.steps[-1]["phase_seconds"]]
    read = statistics.mean(probe.read_bytes_per_second for probe in probes)
    write = statistics.mean(probe.write_bytes_per_second for probe in probes)
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
        "read_bytes_per_parameter": sum(last["read_bytes"]) / best.num_parameters,
        "written_bytes_per_parameter": sum(last["written_bytes"]) / best.num_parameters,
    }


def _best(trials: Sequence[Trial]) -> Trial | None:
    return max((trial for trial in trials if trial.has_trained), key=lambda trial: trial.layers, default=None)


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


def layers_for(num_times: int, plain: Trial, width: int) -> int:
    """The depth that has so many times the parameters of a trial."""
    one = _layer_parameters(width)
    return -((plain.num_parameters - plain.layers * one - num_times * plain.num_parameters) // one)


def _layer_parameters(width: int) -> int:
    """Of the GPT's layer: four square matrices for attention, eight for the rest, biases and norms."""
    return 12 * width * width + 13 * width


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
    parser.add_argument("--quick", action="store_true", help="one small cap, a narrow model, two steps")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu" / "frontier.json")
    options = parser.parse_args(arguments)
    if options.quick:
        options.caps, options.width, options.steps, options.stride = [0.5], 512, 2, 0.0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all caps and writes the results.

    Returns:
        0 if every cap's goal was reached or the disk was the limit, 1 if not, 2 if there is no cap to be had here.
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
    is_reached = all(
        row["has_same_losses"] and (row["num_times_plain"] >= options.goal or row["is_limited_by_disk"]) for row in rows
    )
    return 0 if is_reached else 1


def _command(options: argparse.Namespace) -> str:
    """What measures this again, on any machine."""
    names = ("width", "tokens", "steps", "threads", "goal", "stride", "disk_gb")
    settings = [f"--{name.replace('_', '-')} {getattr(options, name):g}" for name in names]
    return f"python benchmarks/frontier.py --caps {' '.join(f'{cap:g}' for cap in options.caps)} {' '.join(settings)}"


def _write(rows: list[dict[str, Any]], cgroup_version: int, options: argparse.Namespace) -> None:
    """What is measured so far: a cap takes from minutes to an hour."""
    result = {
        "schema": "memwall.bench-frontier/1",
        "kind": "cpu-measured",
        "command": _command(options),
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "versions": {"torch": metadata.version("torch"), "python": platform.python_version()},
        "device": {"num_cores": os.cpu_count(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())},
        "load_at_the_end": os.getloadavg(),
        "meter": f"cgroup v{cgroup_version}: peak of the group with page cache; swap off",
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
        "disk_limit_bytes": int(options.disk_gb * 1e9),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
