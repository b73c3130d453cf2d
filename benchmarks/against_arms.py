"""The processes of `against_deepspeed.py`: each trains the same GPT in a memory group that only meters."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from cgroup import memory_cap
from deepspeed_process import deepspeed_run, failure

__all__ = ["SETTINGS", "Run", "deepspeed", "ours", "tuned"]

_CHILD = Path(__file__).resolve().parent / "frontier_child.py"
# Of a process that takes half a minute.
_TIMEOUT_S = 400.0
# Tried one after the other on top of what was faster so far: (name, arguments of `deepspeed_arm.py`).
SETTINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("blocks of 8 MiB", ("--block-bytes", str(8 << 20))),
    ("32 requests in a queue", ("--queue-depth", "32")),
    ("2 threads for transfers", ("--io-threads", "2")),
    ("reads and writes of state beside steps", ("--pipeline-read", "--pipeline-write")),
    ("32 M elements stepped at a time", ("--sub-group-elements", str(32 << 20))),
    ("twice the buffers for parameters", ("--buffer-count", "10")),
)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One process."""

    step_seconds: list[float]
    """Of steady steps: DeepSpeed's first records the order of parameters, memwall's first is recorded and its second
    is the first of the plan."""
    phase_seconds: list[float]
    """Medians of forward, backward and step; of DeepSpeed the whole step."""
    read_bytes: list[float]
    """Of a step, by the kernel's counters, as phases."""
    written_bytes: list[float]
    losses: list[float]
    peak_bytes: int
    """Of the group until the last step has ended."""
    whole_peak_bytes: int
    """Of the group: where memwall ends inside a process, it brings parameters and state back into memory."""
    disk_bytes: int
    plan: dict[str, Any]
    """What memwall says of it."""


def deepspeed(settings: Sequence[str], options: argparse.Namespace) -> Run | str:
    """DeepSpeed's ZeRO-3 with NVMe; a text is why it failed."""
    sizes = _sizes(options) | {"heads": options.width // 64}
    arguments = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    try:
        with memory_cap(None) as meter:
            done, found = deepspeed_run(
                meter, options.deepspeed, [*arguments, *settings], disk=options.disk, timeout_s=_TIMEOUT_S
            )
    except subprocess.TimeoutExpired:
        return f"did not end in {_TIMEOUT_S:.0f} s"
    if found is None:
        return failure(done)
    seconds = found["step_seconds"][1:]
    return Run(
        step_seconds=seconds,
        phase_seconds=[median(seconds)],
        read_bytes=[found["read_bytes_per_step"]],
        written_bytes=[found["written_bytes_per_step"]],
        losses=found["losses"],
        peak_bytes=found["cgroup_peak_bytes"],
        whole_peak_bytes=done.peak_bytes,
        disk_bytes=found["swap_file_bytes"],
        plan={},
    )


def ours(arm: str, options: argparse.Namespace, budget_bytes: int = 0) -> Run | str:
    """Arm "plain", or "planned" under `memwall.fit`; a text is why it failed."""
    command = [sys.executable, str(_CHILD), "--arm", arm, "--budget-bytes", str(budget_bytes), "--disk", options.disk]
    command += [part for name, size in _sizes(options).items() for part in (f"--{name}", str(size))]
    with memory_cap(None) as meter:
        done = meter.run(command, timeout_s=_TIMEOUT_S)
    if done.status:
        return failure(done)
    _, *rows = [json.loads(line) for line in done.output.splitlines()]
    steps, plan = rows[: options.steps], (rows[options.steps :] or [{}])[0]
    if "actions" in plan:
        plan["actions"] = [action.partition("(")[0] for action in plan["actions"]]
    steady = steps[2:]
    phases = {
        name: [median(values) for values in zip(*(step[name] for step in steady), strict=True)]
        for name in ("phase_seconds", "read_bytes", "written_bytes")
    }
    return Run(
        step_seconds=[sum(step["phase_seconds"]) for step in steady],
        losses=[step["loss"] for step in steps],
        peak_bytes=steps[-1]["group_peak_bytes"],
        whole_peak_bytes=done.peak_bytes,
        disk_bytes=steps[-1]["disk_bytes"],
        plan=plan,
        **phases,
    )


def tuned(
    run: Callable[[Sequence[str]], Run | str], settings: Sequence[tuple[str, tuple[str, ...]]]
) -> tuple[tuple[str, ...], list[dict[str, Any]]]:
    """DeepSpeed's fastest settings by the median step, and every trial.

    Each setting is tried on top of those that made steps faster before it.

    Raises:
        RuntimeError: it does not train with the settings of `plan.deepspeed_config()`.
    """
    first = run(())
    if isinstance(first, str):
        raise RuntimeError(f"DeepSpeed does not train here: {first}")
    fastest, kept = median(first.step_seconds), ()
    trials: list[dict[str, Any]] = [_trial("as the plan has it", first, is_kept=True)]
    for name, arguments in settings:
        found = run((*kept, *arguments))
        is_faster = not isinstance(found, str) and median(found.step_seconds) < fastest
        if is_faster and not isinstance(found, str):
            fastest, kept = median(found.step_seconds), (*kept, *arguments)
        trials.append(_trial(name, found, is_kept=is_faster))
    return kept, trials


def _trial(name: str, found: Run | str, *, is_kept: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"setting": name, "is_kept": is_kept}
    if isinstance(found, str):
        row |= {"failed": found}
    else:
        row |= {"median_step_seconds": median(found.step_seconds), "peak_bytes": found.peak_bytes}
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) for name in ("width", "layers", "tokens", "steps", "threads")}
