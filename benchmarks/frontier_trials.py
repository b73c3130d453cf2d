"""One size under one cap, in a process of its own; and the search for an arm's largest."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cgroup import CappedRun, memory_cap
from deepspeed_process import deepspeed_run, failure

__all__ = ["Trial", "best", "frontier", "largest", "layer_parameters", "layers_for", "layers_on_disk", "run"]

# Disk per parameter: itself, its gradient, two moments.
DISK_BYTES_PER_PARAMETER = 16
_CHILD = Path(__file__).resolve().parent / "frontier_child.py"
_TIMEOUT_S = 3600.0
# DeepSpeed's peak grows by this much for each parameter, as measured: where its search begins, not where it ends.
_DEEPSPEED_BYTES_PER_PARAMETER, _DEEPSPEED_BASE_BYTES = 13.4, 640 << 20
_DEEPSPEED_TIMEOUT_S = 600.0


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
    reason: str
    """Why it did not train; empty where it did."""


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number for which `fits`, when it does for all smaller ones; 0 if there is none.

    Args:
        fits: asked for as few numbers as may be, near the guess first.
        guess: at least 1.
    """
    low, high, step = guess, guess, 1
    if fits(guess):
        while fits(low + step):
            low, step = low + step, 2 * step
        high = low + step
    else:
        low = max(0, high - step)
        while low > 0 and not fits(low):
            high, step = low, 2 * step
            low = max(0, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def run(arm: str, layers: int, cap_bytes: int, options: argparse.Namespace) -> Trial:
    """Trains a model of this depth under the cap.

    Raises:
        RuntimeError: an arm other than DeepSpeed failed, and not for its memory.
    """
    if arm == "deepspeed":
        return _told(arm, _deepspeed(layers, cap_bytes, options), cap_bytes)
    try:
        with memory_cap(cap_bytes) as cap:
            done = cap.run(_command(arm, layers, options), timeout_s=_TIMEOUT_S)
    except subprocess.TimeoutExpired as ended:
        raise RuntimeError(f"{arm} with {layers} layers did not end in {_TIMEOUT_S:.0f} s") from ended
    trial = _told(arm, _trial(layers, done.output, done, options), cap_bytes)
    if not trial.has_trained and not trial.is_oom_killed:
        raise RuntimeError(f"{arm} with {layers} layers ended with status {done.status}: {done.errors[-2000:]}")
    return trial


def run_with_swap(layers: int, cap_bytes: int, timeout_s: float, options: argparse.Namespace) -> Trial:
    """Plain PyTorch under a cap on memory alone, as far as it comes in the time; the machine's swap holds the rest."""
    with memory_cap(cap_bytes, may_swap=True) as cap:
        try:
            done = cap.run(_command("plain", layers, options), timeout_s=timeout_s)
        except subprocess.TimeoutExpired as ended:
            output = ended.stdout.decode() if isinstance(ended.stdout, bytes) else ended.stdout or ""
            trial = _trial(layers, output, None, options)
        else:
            trial = _trial(layers, done.output, done, options)
    return _told("swap", trial, cap_bytes)


def frontier(arm: str, cap_bytes: int, guess: int, options: argparse.Namespace, most: int | None = None) -> list[Trial]:
    """All trials of an arm, by depth; no deeper than `most`."""
    trials: dict[int, Trial] = {}

    def fits(layers: int) -> bool:
        if most is not None and layers > most:
            return False
        if layers not in trials:
            trials[layers] = run(arm, layers, cap_bytes, options)
        return trials[layers].has_trained

    largest(fits, max(1, guess if most is None else min(guess, most)))
    return [trials[layers] for layers in sorted(trials)]


def deepspeed_guess(cap_bytes: int, width: int) -> int:
    """Where DeepSpeed's search begins."""
    return int((cap_bytes - _DEEPSPEED_BASE_BYTES) / (_DEEPSPEED_BYTES_PER_PARAMETER * layer_parameters(width)))


def best(trials: Sequence[Trial]) -> Trial | None:
    """The deepest that trained."""
    return max((trial for trial in trials if trial.has_trained), key=lambda trial: trial.layers, default=None)


def layers_for(num_times: int, plain: Trial, width: int) -> int:
    """The depth that has so many times the parameters of a trial."""
    one = layer_parameters(width)
    return -((plain.num_parameters - plain.layers * one - num_times * plain.num_parameters) // one)


def layers_on_disk(width: int, disk_bytes: int) -> int:
    """How many layers of this width have room on disk with gradients and state."""
    return disk_bytes // (DISK_BYTES_PER_PARAMETER * layer_parameters(width))


def layer_parameters(width: int) -> int:
    """Of the GPT's layer: four square matrices for attention, eight for the rest, biases and norms."""
    return 12 * width * width + 13 * width


def _command(arm: str, layers: int, options: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(_CHILD), "--arm", arm, "--layers", str(layers), "--width", str(options.width)]
    command += ["--tokens", str(options.tokens), "--steps", str(options.steps), "--threads", str(options.threads)]
    return [*command, "--disk", options.disk]


def _trial(layers: int, output: str, done: CappedRun | None, options: argparse.Namespace) -> Trial:
    """What the child's lines say; of None the time was over."""
    head, *steps = [json.loads(line) for line in output.splitlines()] or [{}]
    return Trial(
        layers=layers,
        num_parameters=head.get("num_parameters", 0),
        has_trained=done is not None and done.status == 0 and len(steps) == options.steps,
        is_oom_killed=done is not None and done.is_oom_killed,
        peak_bytes=0 if done is None else done.peak_bytes,
        build_seconds=head.get("build_seconds", 0.0),
        steps=steps,
        reason="the time was over" if done is None else failure(done),
    )


def _deepspeed(layers: int, cap_bytes: int, options: argparse.Namespace) -> Trial:
    """ZeRO-3 with NVMe, which recomputes every block; what keeps it from training is a result, whatever it is."""
    sizes = {"width": options.width, "heads": options.width // 64, "layers": layers, "tokens": options.tokens}
    sizes |= {"steps": options.steps, "threads": options.threads}
    arguments = ["--checkpoint", *(part for name, size in sizes.items() for part in (f"--{name}", str(size)))]
    try:
        with memory_cap(cap_bytes) as cap:
            done, found = deepspeed_run(
                cap, options.deepspeed, arguments, disk=options.disk, timeout_s=_DEEPSPEED_TIMEOUT_S
            )
    except subprocess.TimeoutExpired:
        done, found = None, None
    rows = [] if found is None else list(zip(found["losses"], found["step_seconds"], strict=True))
    return Trial(
        layers=layers,
        num_parameters=0 if found is None else found["num_parameters"],
        has_trained=found is not None,
        is_oom_killed=done is not None and done.is_oom_killed,
        peak_bytes=0 if done is None else done.peak_bytes,
        build_seconds=0.0 if found is None else found["build_seconds"],
        steps=[
            {
                "loss": loss,
                "phase_seconds": [seconds],
                "read_bytes": [found["read_bytes_per_step"]],
                "written_bytes": [found["written_bytes_per_step"]],
                "disk_bytes": found["swap_file_bytes"],
            }
            for loss, seconds in rows
            if found is not None
        ],
        reason=f"did not end in {_DEEPSPEED_TIMEOUT_S:.0f} s" if done is None else failure(done),
    )


def _told(arm: str, trial: Trial, cap_bytes: int) -> Trial:
    seconds = " ".join(f"{sum(step['phase_seconds']):.1f}" for step in trial.steps)
    print(
        f"{cap_bytes / 2**30:g} GiB, {arm}, {trial.layers} layers: "
        f"{'trains' if trial.has_trained else 'does not'}, peak {trial.peak_bytes / 2**20:.0f} MiB, steps {seconds} s"
        f"{'; ' if trial.reason else ''}{trial.reason}",
        file=sys.stderr,
        flush=True,
    )
    return trial
