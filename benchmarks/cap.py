"""The claim: a script that the kernel kills at a memory cap finishes below it under memwall, with the same weights.

    python benchmarks/cap.py [--steps 20] [--shares 75 60]
    python benchmarks/cap.py --model weights --shares 45 31

The first model is large by its activations, the second by its weights: below half of its plain peak there is no room
for gradients beside parameters, and below a third none for building the model. Per share of the plain peak, in one
memory control group each: the plain script, and the same script under `memwall run --budget SIZE`. The reference is the
plain script without a cap. Writes results/cpu/cap.json, or cap_weights.json.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from cgroup import CappedRun, CapUnavailable, memory_cap, own_group
from revision import git

__all__ = ["MODEL", "MODELS", "Case", "Reference", "run_case", "run_reference"]

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "scripts" / "train_plain.py"
MODEL = ("--width", "128", "--layers", "8", "--batch", "28", "--sequence", "256")
MODELS = {
    "activations": MODEL,
    "weights": ("--width", "768", "--layers", "12", "--batch", "1", "--sequence", "64"),
}
_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The plain script without a cap."""

    peak_bytes: int
    """Highest resident bytes, as the system accounts them to the process."""
    group_peak_bytes: int
    sha256: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Case:
    """One cap."""

    cap_bytes: int
    plain: CappedRun
    memwall: CappedRun
    sha256: str
    report: dict[str, Any]
    """What `memwall run --report` wrote; {} if it wrote nothing."""


def run_reference(folder: Path, num_steps: int, model: Sequence[str] = MODEL) -> Reference:
    """Runs the plain script in a group that limits nothing.

    Raises:
        CapUnavailable: no group can be made here.
        RuntimeError: the script failed.
    """
    weights = folder / "plain.safetensors"
    with memory_cap(None) as meter:
        done = meter.run(_script(num_steps, weights, model), timeout_s=_TIMEOUT_S)
    found = re.search(r"^peak_bytes (\d+)$", done.output, re.MULTILINE)
    if done.status or found is None:
        raise RuntimeError(f"the plain script ended with status {done.status}: {done.errors[-2000:]}")
    return Reference(
        peak_bytes=int(found.group(1)),
        group_peak_bytes=done.peak_bytes,
        sha256=_sha256(weights),
        seconds=done.seconds,
    )


def run_case(folder: Path, num_steps: int, cap_bytes: int, model: Sequence[str] = MODEL) -> Case:
    """Runs the script under one cap, plain and under memwall."""
    weights, report = folder / "capped.safetensors", folder / "run.json"
    for path in (weights, report):
        path.unlink(missing_ok=True)
    with memory_cap(cap_bytes) as cap:
        plain = cap.run(_script(num_steps, folder / "never.safetensors", model), timeout_s=_TIMEOUT_S)
    command = [sys.executable, "-m", "memwall", "run", "--budget", str(cap_bytes), "--disk", str(folder)]
    with memory_cap(cap_bytes) as cap:
        planned = cap.run(
            [*command, "--report", str(report), *_script(num_steps, weights, model)[1:]], timeout_s=_TIMEOUT_S
        )
    return Case(
        cap_bytes=cap_bytes,
        plain=plain,
        memwall=planned,
        sha256=_sha256(weights) if weights.exists() else "",
        report=json.loads(report.read_text()) if report.exists() else {},
    )


def _script(num_steps: int, weights: Path, model: Sequence[str]) -> list[str]:
    return [sys.executable, str(SCRIPT), *model, "--steps", str(num_steps), "--out", str(weights)]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _row(case: Case, reference: Reference, share: int) -> dict[str, Any]:
    """One cap's figures, as they are committed."""
    forecast, measured = case.report.get("forecast", {}), case.report.get("measured", {})
    steady = forecast.get("phases", {}).get("steady_step", {})
    return {
        "share_percent": share,
        "cap_bytes": case.cap_bytes,
        "plain": {
            "status": case.plain.status,
            "is_oom_killed": case.plain.is_oom_killed,
            "num_limit_hits": case.plain.num_limit_hits,
            "num_steps": case.plain.output.count("loss"),
        },
        "memwall": {
            "status": case.memwall.status,
            "group_peak_bytes": case.memwall.peak_bytes,
            "num_limit_hits": case.memwall.num_limit_hits,
            "num_oom_kills": case.memwall.num_oom_kills,
            "num_steps": case.memwall.output.count("loss"),
            "seconds": case.memwall.seconds,
            "predicted_steady_peak_bytes": steady.get("process_bytes"),
            "margin_bytes": forecast.get("margin_bytes"),
            "measured_steady_peak_bytes": measured.get("steady_peak_bytes"),
            "measured_first_step_peak_bytes": measured.get("first_step_peak_bytes"),
            "measured_peak_bytes": measured.get("peak", {}).get("process_bytes"),
            "step_seconds_median": measured.get("step_seconds_median"),
            "planning_seconds": measured.get("plan_seconds"),
            "actions": [action["kind"] for action in forecast.get("actions", ())],
            "has_same_weights": case.sha256 == reference.sha256,
            "errors": case.memwall.errors[-1000:] if case.memwall.status else "",
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs all caps and writes the results.

    Returns:
        0 if every claim held, 1 if one did not, 2 if there is no cap to be had here.
    """
    parser = argparse.ArgumentParser(description="a script under a memory cap, plain and under memwall")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shares", type=int, nargs="+", default=[75, 60], help="caps, in percent of the plain peak")
    parser.add_argument("--model", choices=sorted(MODELS), default="activations")
    parser.add_argument("--out", type=Path, help="by default in results/cpu")
    options = parser.parse_args(arguments)
    model, is_first = MODELS[options.model], options.model == "activations"
    out = options.out or ROOT / "benchmarks" / "results" / "cpu" / ("cap.json" if is_first else "cap_weights.json")
    folder = Path(tempfile.mkdtemp(prefix="memwall-cap-"))
    try:
        version = own_group()[1]
        reference = run_reference(folder, options.steps, model)
        print(f"plain, no cap: peak {reference.peak_bytes / 2**20:.0f} MiB, {reference.seconds:.0f} s", file=sys.stderr)
        rows = []
        for share in options.shares:
            cap_bytes = reference.peak_bytes * share // 100
            row = _row(run_case(folder, options.steps, cap_bytes, model), reference, share)
            rows.append(row)
            print(json.dumps(row), file=sys.stderr)
    except CapUnavailable as reason:
        print(f"no cap can be enforced here: {reason}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder)
    result = {
        "schema": "memwall.bench-cap/1",
        "kind": "cpu-measured",
        "command": f"python benchmarks/cap.py --model {options.model} --steps {options.steps} "
        f"--shares {' '.join(map(str, options.shares))}",
        "commit": git("rev-parse", "HEAD"),
        "is_dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "versions": {name: metadata.version(name) for name in ("torch", "highspy")}
        | {"python": platform.python_version()},
        "device": {"num_cores": os.cpu_count(), "machine": platform.machine(), "libc": " ".join(platform.libc_ver())},
        "meter": f"cgroup v{version}: peak of the group with page cache; swap off",
        "script": [SCRIPT.name, *model],
        "num_steps": options.steps,
        "reference": {
            "peak_bytes": reference.peak_bytes,
            "group_peak_bytes": reference.group_peak_bytes,
            "seconds": reference.seconds,
            "sha256": reference.sha256,
        },
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(_holds(row) for row in rows) else 1


def _holds(row: dict[str, Any]) -> bool:
    planned = row["memwall"]
    return bool(
        row["plain"]["is_oom_killed"]
        and planned["status"] == 0
        and planned["group_peak_bytes"] < row["cap_bytes"]
        and planned["has_same_weights"]
    )


if __name__ == "__main__":
    sys.exit(main())
