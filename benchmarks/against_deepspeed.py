"""The claim: where both fit, memwall takes at most half of the memory of DeepSpeed's ZeRO-3 with NVMe, and is faster.

    python benchmarks/against_deepspeed.py [--rounds 3] [--disk DIR] [--deepspeed PYTHON] [--quick]

A GPT of 92.9 M parameters, AdamW, float32, one sequence of 512 tokens. DeepSpeed is tuned first: of its sizes of blocks
and buffers, queues, threads and pipelines whatever makes its steps faster is kept. Then in turns: DeepSpeed at its
best, memwall under a budget of half of DeepSpeed's peak and under the smallest that it can plan for, and plain PyTorch;
before each turn the disk's own speed. A step at least 1.5 times faster than DeepSpeed's is asked for, or, where the
disk's own limit for the bytes forbids that, one of at most 1.15 times that limit. Writes
results/cpu/against_deepspeed.json.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from against_arms import SETTINGS, Run, deepspeed, ours, tuned
from cgroup import CapUnavailable, own_group
from deepspeed_process import DEFAULT_PYTHON, why_no_deepspeed
from disk_bound import bound_seconds
from frontier_trials import DISK_BYTES_PER_PARAMETER, layer_parameters
from knob_report import provenance
from raw_disk import RawDisk

__all__ = ["main", "verdict"]

RESULT = Path(__file__).parent / "results" / "cpu" / "against_deepspeed.json"
_MOST_PEAK_SHARE, _LEAST_TIMES_FASTER, _MOST_TIMES_LIMIT = 0.5, 1.5, 1.15
# A smallest budget is that of a recording; that of another process may differ.
_SMALLEST_FACTORS = (1.0, 1.05, 1.1)


def verdict(
    theirs_peak_bytes: float, ours_peak_bytes: float, theirs_seconds: float, ours_seconds: float, limit_seconds: float
) -> dict[str, Any]:
    """Whether the claim holds.

    Args:
        theirs_peak_bytes: DeepSpeed's, as `theirs_seconds`, of a step.
        ours_peak_bytes: memwall's, as `ours_seconds`.
        limit_seconds: the least that memwall's step can take for its bytes and arithmetic.
    """
    is_limit_in_the_way = limit_seconds * _LEAST_TIMES_FASTER > theirs_seconds
    found = {
        "peak_share": ours_peak_bytes / theirs_peak_bytes,
        "times_faster": theirs_seconds / ours_seconds,
        "limit_seconds": limit_seconds,
        "times_limit": ours_seconds / limit_seconds,
        "is_limit_in_the_way": is_limit_in_the_way,
    }
    is_fast = found["times_faster"] >= _LEAST_TIMES_FASTER
    is_at_limit = is_limit_in_the_way and found["times_limit"] <= _MOST_TIMES_LIMIT
    return found | {"holds": found["peak_share"] <= _MOST_PEAK_SHARE and (is_fast or is_at_limit)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Tunes DeepSpeed, then all arms in turns."""
    best, trials = tuned(lambda settings: deepspeed(settings, options), options.settings)
    fastest = [trial for trial in trials if trial["is_kept"]][-1]
    budget_bytes = int(options.budget_share * fastest["peak_bytes"])
    first = _needed("memwall", ours("planned", options, budget_bytes))
    # A budget is of the process, with its share of library files that are in the system's cache before it begins; a
    # group is charged for what its processes brought in, by which both are compared here.
    budget_bytes += max(0, first.plan["overall_peak_bytes"] - first.peak_bytes)
    smallest_bytes, failures = _smallest(first, options)
    turns: dict[str, Callable[[], Run | str]] = {
        "deepspeed": lambda: deepspeed(best, options),
        "memwall": lambda: ours("planned", options, budget_bytes),
        "plain": lambda: ours("plain", options),
    }
    if smallest_bytes is not None:
        turns["memwall-smallest"] = lambda: ours("planned", options, smallest_bytes)
    runs: dict[str, list[Run]] = {arm: [] for arm in turns}
    speeds = []
    file_bytes = options.layers * layer_parameters(options.width) * DISK_BYTES_PER_PARAMETER
    for _ in range(options.rounds):
        for arm, turn in turns.items():
            with closing(RawDisk(options.disk, file_bytes=file_bytes)) as disk:
                speeds.append([1 / seconds for seconds in disk.seconds_per_byte()])
            runs[arm].append(_needed(arm, turn()))
            seconds, peak_bytes = statistics.median(runs[arm][-1].step_seconds), runs[arm][-1].peak_bytes
            print(f"{arm}: {seconds:.3f} s a step, peak {peak_bytes / 2**20:.0f} MiB", file=sys.stderr, flush=True)
    arms = {arm: _summary(of_arm) for arm, of_arm in runs.items()}
    write, read = (statistics.median(of_kind) for of_kind in zip(*speeds, strict=True))
    return {
        "deepspeed_arguments": list(best),
        "tuning": trials,
        "budget_bytes": {"memwall": budget_bytes, "memwall-smallest": smallest_bytes},
        "smallest_failures": failures,
        "disk": {
            "file_bytes": file_bytes,
            "read_bytes_per_second": read,
            "write_bytes_per_second": write,
            "write_read_bytes_per_second": speeds,
        },
        "arms": arms,
        "has_same_losses": {
            arm: all(run.losses == runs["plain"][0].losses for run in of_arm) for arm, of_arm in runs.items()
        },
        "verdicts": {
            arm: verdict(
                arms["deepspeed"]["peak_bytes"],
                arms[arm]["peak_bytes"],
                arms["deepspeed"]["step_seconds_quartiles"][1],
                arms[arm]["step_seconds_quartiles"][1],
                bound_seconds(
                    arms["plain"]["phase_seconds"], arms[arm]["read_bytes"], arms[arm]["written_bytes"], read, write
                ),
            )
            for arm in runs
            if arm.startswith("memwall")
        },
    }


def _smallest(first: Run, options: argparse.Namespace) -> tuple[int | None, list[str]]:
    """The smallest budget that memwall trains under, and what was said of smaller ones."""
    failures = []
    for factor in _SMALLEST_FACTORS:
        budget_bytes = int(factor * first.plan["smallest_feasible_bytes"])
        found = ours("planned", options, budget_bytes)
        if isinstance(found, Run):
            return budget_bytes, failures
        failures.append(f"{budget_bytes} bytes: {found}")
    return None, failures


def _needed(arm: str, found: Run | str) -> Run:
    if isinstance(found, str):
        raise RuntimeError(f"{arm} failed: {found}")
    return found


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    """One arm over all rounds: quartiles of its steps, medians of phases and bytes, and the highest peak."""
    seconds = [value for run in runs for value in run.step_seconds]
    medians = {
        name: [statistics.median(values) for values in zip(*(getattr(run, name) for run in runs), strict=True)]
        for name in ("phase_seconds", "read_bytes", "written_bytes")
    }
    return {
        "step_seconds_quartiles": statistics.quantiles(seconds, n=4, method="inclusive"),
        "step_seconds": [run.step_seconds for run in runs],
        **medians,
        "peak_bytes": max(run.peak_bytes for run in runs),
        "whole_peak_bytes": max(run.whole_peak_bytes for run in runs),
        "disk_bytes": max(run.disk_bytes for run in runs),
        "losses": runs[0].losses,
        "plan": runs[-1].plan,
    }


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="memwall against DeepSpeed's ZeRO-3 with NVMe where both fit")
    for name, default in (("width", 768), ("layers", 13), ("tokens", 512), ("steps", 6), ("threads", 2), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--disk", default=tempfile.gettempdir())
    parser.add_argument("--deepspeed", type=Path, default=DEFAULT_PYTHON, metavar="PYTHON", help="that has DeepSpeed")
    parser.add_argument("--quick", action="store_true", help="a small model, one round, one setting tried")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    if options.steps < 4:
        parser.error("two steady steps at least are needed: --steps 4 or more")
    options.settings, options.budget_share = SETTINGS, _MOST_PEAK_SHARE
    if options.quick:
        options.width, options.layers, options.tokens, options.steps, options.rounds = 256, 3, 64, 4, 1
        # Half of what DeepSpeed takes for a small model is less than a process that has done nothing.
        options.settings, options.budget_share = SETTINGS[:1], 1.0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if the claim holds, 1 if not, 2 where DeepSpeed or memory groups are not to be had."""
    options = _options(arguments)
    reason = why_no_deepspeed(options.deepspeed)
    if reason is not None:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 2
    options.disk = tempfile.mkdtemp(prefix="memwall-against-deepspeed-", dir=options.disk)
    load = os.getloadavg()[0]
    try:
        version = own_group()[1]
        found = measure(options)
    except CapUnavailable as missing:
        print(f"nothing was measured: {missing}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(options.disk)
    sizes = {name: getattr(options, name) for name in ("width", "layers", "tokens", "steps", "threads", "rounds")}
    result = {
        **provenance(),
        "schema": "memwall.bench-against-deepspeed/1",
        "command": "python benchmarks/against_deepspeed.py "
        + " ".join(f"--{name} {size}" for name, size in sizes.items()),
        "meter": f"cgroup v{version}: peak of a group without limit, until the last step has ended",
        "model": {"batch": 1, "optimizer": "AdamW", "dtype": "float32"}
        | {f"num_{name}" if name != "width" else name: size for name, size in sizes.items()},
        "load_average": load,
        **found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(found["verdicts"], indent=1))
    has_same_losses = all(same for arm, same in found["has_same_losses"].items() if arm != "deepspeed")
    return 0 if has_same_losses and found["verdicts"]["memwall"]["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
