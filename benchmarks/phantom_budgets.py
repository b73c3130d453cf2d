"""`memwall run` of a small GPT on the phantom CUDA device, under shares of its plain peak: simulated.

    phantom/run python benchmarks/phantom_budgets.py -o benchmarks/results/phantom/budgets.json

Counted is what the device's driver says is in use at its highest, in each step after the first: segments and context.
With numbers, every run must end with the weights of the plain one, bit for bit.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
SHARES = (80, 60, 40, 25)
# Of a small model 500 MiB of context would be nearly all.
CONTEXT_BYTES = 32 * MIB
_SCRIPT = Path(__file__).with_name("phantom_budgets_script.py")


def run(folder: Path, budget_bytes: int | None) -> dict[str, Any]:
    """Returns what one run said: its steps' peaks, its digest and memwall's report."""
    said, report = folder / "said.json", folder / "report.json"
    report.unlink(missing_ok=True)
    said.unlink(missing_ok=True)
    memwall = [] if budget_bytes is None else ["-m", "memwall", "run", "--budget", str(budget_bytes)]
    options = [] if budget_bytes is None else ["--report", str(report)]
    command = [sys.executable, *memwall, *options, str(_SCRIPT), str(said)]
    settings = {"PHANTOM_NUMBERS": "1", "PHANTOM_ORDER": "lazy", "PHANTOM_CONTEXT_BYTES": str(CONTEXT_BYTES)}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(said.read_text()) if said.exists() else {}
    found |= {"status": done.returncode, "error": done.stderr.strip().splitlines()[-12:] if done.returncode else []}
    if report.exists():
        found["report"] = json.loads(report.read_text())
    return found


def row_of(share: int, budget_bytes: int, plain: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures of one budget."""
    row: dict[str, Any] = {"share_percent": share, "budget_bytes": budget_bytes, "status": found["status"]}
    if "report" not in found or "digest" not in found:
        return {**row, "error": found["error"]}
    counted = max(found["peak_bytes"][1:])
    predicted = found["report"]["forecast"]["phases"]["steady_step"]["process_bytes"]
    return {
        **row,
        "predicted_bytes": predicted,
        "counted_bytes": counted,
        "prediction_error_percent": round(100 * (predicted - counted) / counted, 2),
        "first_step_bytes": found["peak_bytes"][0],
        "exceeded_bytes": max(0, counted - budget_bytes),
        "num_replans": found["report"]["measured"]["num_replans"],
        "is_digest_equal": found["digest"] == plain["digest"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = run(folder, None)
        peak_bytes = max(plain["peak_bytes"])
        rows = []
        print(f"plain peak {peak_bytes / MIB:.1f} MiB; simulated on the phantom device")
        print("share   budget MiB  predicted  counted  error %  over MiB  digest  status")
        for share in arguments.shares:
            budget_bytes = peak_bytes * share // 100
            row = row_of(share, budget_bytes, plain, run(folder, budget_bytes))
            rows.append(row)
            if "error" in row:
                print(f"{share:4} %  {budget_bytes / MIB:11.1f}  status {row['status']}: {' '.join(row['error'])}")
                continue
            digest = "equal" if row["is_digest_equal"] else "OTHER"
            print(
                f"{share:4} %  {budget_bytes / MIB:11.1f} {row['predicted_bytes'] / MIB:10.1f} "
                f"{row['counted_bytes'] / MIB:8.1f} {row['prediction_error_percent']:8} "
                f"{row['exceeded_bytes'] / MIB:9.1f}  {digest:6} {row['status']:7}"
            )
    result = {"tag": "simulated", "device": "phantom h100-80gb", "plain_peak_bytes": peak_bytes, "rows": rows}
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    ran = [row for row in rows if "error" not in row]
    return int(any(row["exceeded_bytes"] or not row["is_digest_equal"] for row in ran))


if __name__ == "__main__":
    sys.exit(main())
