"""The smallest memory limit under which a training run finishes on this CPU, enforced by the kernel.

    python benchmarks/smallest_cap.py [--steps 3] [--seconds 900] [FAMILY ...]

Cases of the zoo in `prediction_zoo.py`, in float32 with AdamW. Each trial is a fresh process
in a memory control group of its own, with swap off: everything counts, from Python's own memory to the page cache that
cannot be given up. A process that the kernel kills, or that takes ten times as long as without a limit and is ended,
did not fit. Bisection ends at 1 % and 32 MiB. Seconds mean something where the load average says that nothing else
ran. Writes results/cpu/smallest_cap.json.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from cap_search import Outcome, Trial, smallest_cap
from cgroup import CappedRun, CapUnavailable, memory_cap, own_group
from knob_report import provenance
from prediction_child import own_standard_output
from prediction_zoo import FAMILIES, OPTIMIZERS, Precision, workload, zoo_sha256

RESULT = Path(__file__).parent / "results" / "cpu" / "smallest_cap.json"
CASES = ("gpt2", "resnet", "t5")
OPTIMIZER = "adamw-foreach"
PRECISION: Precision = "float32"
_HANGS = 10
_LEAST_SECONDS = 30.0
_MOST_SECONDS = 300.0


def train(family: str, num_steps: int) -> list[float]:
    """Seconds of each step of a case, in this process."""
    run = workload(family, OPTIMIZER, PRECISION)
    model, batch = run.make_model(), run.make_batch()
    optimizer = OPTIMIZERS[OPTIMIZER](model.parameters())
    seconds = []
    for _ in range(num_steps):
        begin = time.perf_counter()
        run.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)
    return seconds


def run_under(
    family: str, num_steps: int, limit_bytes: int | None, timeout_s: float
) -> tuple[Outcome, CappedRun | None, float]:
    """How a fresh process fared, and the median seconds of its later steps.

    Raises:
        CapUnavailable: no memory control group can be made here.
    """
    command = [sys.executable, __file__, "--child", "--steps", str(num_steps), family]
    with memory_cap(limit_bytes) as cap:
        try:
            done = cap.run(command, timeout_s=timeout_s)
        except subprocess.TimeoutExpired:
            return "hung", None, 0.0
    if done.status == 0:
        return "finished", done, median(json.loads(done.output)[1:])
    return "out of memory" if done.num_oom_kills else "failed", done, 0.0


def case_row(family: str, num_steps: int, deadline: float) -> dict[str, Any]:
    """One case without a limit, then its cap.

    Raises:
        CapUnavailable: no memory control group can be made here.
        RuntimeError: it does not finish, with or without a limit at what it took then.
    """
    outcome, free, free_seconds = run_under(family, num_steps, None, _MOST_SECONDS)
    if free is None or outcome != "finished":
        raise RuntimeError(f"{family} without a limit: {outcome}; {'' if free is None else free.errors[-1000:]}")

    def attempt(limit_bytes: int) -> Trial:
        timeout_s = max(_LEAST_SECONDS, _HANGS * free.seconds)
        outcome, done, seconds = run_under(family, num_steps, limit_bytes, timeout_s)
        if outcome == "failed" and done is not None:
            print(done.errors[-1000:], file=sys.stderr)
        print(f"{family} under {limit_bytes / 2**20:.0f} MiB: {outcome}", file=sys.stderr, flush=True)
        return Trial(limit_bytes=limit_bytes, outcome=outcome, seconds=seconds)

    cap = smallest_cap(
        attempt, floor_bytes=0, ceiling_bytes=free.peak_bytes, is_time_over=lambda: time.monotonic() > deadline
    )
    if cap is None:
        raise RuntimeError(f"{family} does not finish with the {free.peak_bytes} bytes that it took without a limit")
    return {
        "family": family,
        "precision": PRECISION,
        "optimizer": OPTIMIZER,
        "num_samples": FAMILIES[family].num_samples,
        "unlimited": {"group_peak_bytes": free.peak_bytes, "step_seconds": free_seconds},
        **msgspec.to_builtins(cap),
        "slowdown": cap.step_seconds / free_seconds,
    }


def table(result: dict[str, Any]) -> str:
    """Returns the caps as a Markdown table, as the README has it."""
    lines = ["| case | without a limit | too small | cap | of it | trials |", "|" + " --- |" * 6]
    for row in result["rows"]:
        peak_bytes = row["unlimited"]["group_peak_bytes"]
        sizes = (peak_bytes, row["too_small_bytes"], row["cap_bytes"])
        lines.append(
            f"| {row['family']}, {row['precision']}, {row['optimizer']}, {row['num_samples']} samples | "
            + " | ".join(f"{size / 2**20:,.0f} MiB" for size in sizes)
            + f" | {row['cap_bytes'] / peak_bytes:.0%} | {len(row['trials'])} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 where no limit can be enforced."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=CASES, metavar="FAMILY", help=f"default: {' '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no further trial after so long")
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := [family for family in options.families if family not in FAMILIES]:
        parser.error(f"no family {unknown[0]}; there are {', '.join(FAMILIES)}")
    if options.child:
        warnings.simplefilter("ignore")
        with own_standard_output() as lines:
            print(json.dumps(train(options.families[0], options.steps)), file=lines, flush=True)
        return 0
    begin, load = time.monotonic(), os.getloadavg()[0]
    try:
        version = own_group()[1]
        rows = [case_row(family, options.steps, begin + options.seconds) for family in options.families]
    except CapUnavailable as reason:
        print(f"no limit can be enforced here: {reason}; nothing was measured", file=sys.stderr)
        return 2
    result = {
        **provenance(),
        "schema": "memwall.smallest-cap/1",
        "tag": "cpu-measured",
        "quantity": "cap: smallest limit of the process's control group under which its steps finish",
        "phase": "the whole run: import, build, first and steady steps",
        "command": f"python benchmarks/smallest_cap.py --steps {options.steps} {' '.join(options.families)}",
        "meter": f"cgroup v{version}, swap off",
        "zoo_sha256": zoo_sha256(),
        "num_steps": options.steps,
        "load_average": load,
        "rows": rows,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
