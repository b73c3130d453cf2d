"""Live runs on this machine's GPU: a small GPT under `memwall run`, at five shares of its plain peak.

    python benchmarks/gpu_budgets.py [--seconds N] [--tiny] [--output FILE]

Counted is what the device's driver says is in use at its highest, segments and context, from where forward begins. A
budget is kept in every step, the forecast is within 2 % of what is counted in those after the first, and the weights
are those of the plain run bit for bit; a second plain run says whether the device repeats itself at all. Kernels are
torch's deterministic ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_device import device_name_by_child, has_device, is_phantom, slug_of, tag
from knob_report import provenance

MIB = 1 << 20
SHARES_PERCENT = (90, 75, 60, 45, 30)
MOST_ERROR_PERCENT = 2.0
SIZE = ("1024", "12", "512", "16")
"""Width, layers, tokens of a sample, samples of a batch."""
TINY_SIZE = ("128", "4", "128", "48")
_STATUS_REFUSED = 3
_MOST_RUN_SECONDS = 180.0
_SCRIPT = Path(__file__).with_name("gpu_budgets_script.py")


def run(folder: Path, size: Sequence[str], budget_bytes: int | None = None) -> dict[str, Any]:
    """Returns what one run said: its steps' peaks and seconds, its digest and memwall's report."""
    said, report = folder / "said.json", folder / "report.json"
    for path in (said, report):
        path.unlink(missing_ok=True)
    memwall = []
    if budget_bytes is not None:
        memwall = ["-m", "memwall", "run", "--budget", str(budget_bytes), "--report", str(report)]
    command = [sys.executable, *memwall, str(_SCRIPT), str(said), *size]
    # torch's deterministic kernels ask for cuBLAS's workspace to be fixed.
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_MOST_RUN_SECONDS, check=False
        )
        status, error = done.returncode, done.stderr.strip()[-1000:]
    except subprocess.TimeoutExpired:
        status, error = 124, f"not done after {_MOST_RUN_SECONDS:.0f} s"
    found: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {}
    found |= {"status": status, "error_text": error if status else ""}
    if report.exists():
        found["report"] = json.loads(report.read_text())
    return found


def row_of(share_percent: int, budget_bytes: int, plain: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of one budget; of a run that was refused or broke, what it said."""
    row: dict[str, Any] = {"share_percent": share_percent, "budget_bytes": budget_bytes, "status": found["status"]}
    if "report" not in found or "digest" not in found:
        return {**row, "error_text": found["error_text"]}
    counted_bytes = max(found["peak_bytes"][1:])
    forecast, measured = found["report"]["forecast"], found["report"]["measured"]
    predicted_bytes = forecast["phases"]["steady_step"]["process_bytes"]
    return {
        **row,
        "predicted_bytes": predicted_bytes,
        "counted_bytes": counted_bytes,
        "error_percent": 100 * (predicted_bytes / counted_bytes - 1),
        "first_step_bytes": found["peak_bytes"][0],
        "exceeded_bytes": max(0, max(found["peak_bytes"]) - budget_bytes),
        "num_replans": measured["num_replans"],
        "step_seconds": found["step_seconds"],
        "predicted_step_seconds": forecast["step_seconds"],
        "slowdown": found["step_seconds"] / plain["step_seconds"],
        "is_digest_equal": found["digest"] == plain["digest"],
        "step_peak_bytes": found["peak_bytes"],
        "report": found["report"],
    }


def judged(document: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Returns what went wrong, and the goals that are not met."""
    failures, missed = [], []
    if not document["is_plain_repeated"]:
        missed.append("two plain runs end with other weights: equality says nothing here")
    for row in document["rows"]:
        name = f"{row['share_percent']} % of the plain peak"
        if "counted_bytes" not in row:
            kind = missed if row["status"] == _STATUS_REFUSED else failures
            kind.append(f"{name}: status {row['status']}: {' '.join(row['error_text'].split())[-200:]}")
            continue
        if document["is_plain_repeated"] and not row["is_digest_equal"]:
            failures.append(f"{name}: weights are not the plain run's")
        if row["exceeded_bytes"]:
            missed.append(f"{name}: {row['exceeded_bytes'] / MIB:.1f} MiB over the budget")
        if abs(row["error_percent"]) > MOST_ERROR_PERCENT:
            missed.append(f"{name}: forecast {row['error_percent']:+.1f} % off")
    return failures, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="begin no further run after so long")
    parser.add_argument("--tiny", action="store_true", help="a small model, one budget")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not has_device("gpu_budgets"):
        return 2
    stop, name = time.monotonic() + options.seconds, device_name_by_child()
    size, shares = (TINY_SIZE, SHARES_PERCENT[1:2]) if options.tiny else (SIZE, SHARES_PERCENT)
    output = options.output or Path(__file__).parent / "results" / slug_of(name) / "budgets.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    document: dict[str, Any] = {
        **provenance(),
        "schema": "memwall.gpu-budgets/1",
        "tag": tag(),
        "device": name,
        "rows": [],
        "not_reached": [f"{share} %" for share in shares],
        "failures": [],
        "missed": [],
    }
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        plain = run(folder, size)
        if "digest" not in plain:
            document["failures"] = [f"the plain run ended with status {plain['status']}: {plain['error_text'][-300:]}"]
            output.write_text(json.dumps(document, indent=1) + "\n")
            print(document["failures"][0], file=sys.stderr)
            return 1
        peak_bytes = max(plain["peak_bytes"])
        document |= {"plain_peak_bytes": peak_bytes, "plain_step_seconds": plain["step_seconds"]}
        # A phantom's kernels are torch's for CPUs, which repeat themselves.
        document["is_plain_repeated"] = is_phantom() or run(folder, size).get("digest") == plain["digest"]
        output.write_text(json.dumps(document, indent=1) + "\n")
        for share in shares:
            if time.monotonic() > stop:
                break
            budget_bytes = peak_bytes * share // 100
            row = row_of(share, budget_bytes, plain, run(folder, size, budget_bytes))
            document["rows"].append(row)
            document["not_reached"].pop(0)
            print(json.dumps({key: value for key, value in row.items() if key != "report"}), flush=True)
            document["failures"], missed = judged(document)
            document["missed"] = [] if options.tiny else missed
            output.write_text(json.dumps(document, indent=1) + "\n")
    wrong = document["failures"] + document["missed"]
    print(f"wrote {output}; {'; '.join(wrong) or 'every goal is met'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
