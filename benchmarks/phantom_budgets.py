"""`memwall run` of six small models on the phantom CUDA device, under shares of their plain peaks: simulated.

    phantom/run python benchmarks/phantom_budgets.py [MODEL ...] [--shares 80 60 40 25]

Counted is what the device's driver says is in use at its highest, segments and context: while the model is built, up to
the first forward, and in each step from where its forward begins. None of them may pass the budget. The forecast is of
a steady step, compared with the last one. Shown beside it are the build; the first step, which is recorded; and the
first under a plan, which also proves what that does, for which saved tensors live longer.

With numbers, every run must end with the weights of the plain one, bit for bit. A budget that is refused names the
smallest one that would do, and the model is run under that one as well.

Ends with status 1 where a run passed its budget, ended with other weights or failed, or where the smallest budget that
was told does not hold. The result is benchmarks/results/simulated/phantom_budgets.json; models that are not named keep
their rows of an earlier call.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memwall.units import parse_size

MIB = 1 << 20
MODELS = ("gpt", "llama", "vit", "resnet", "mlp", "wide")
SHARES = (80, 60, 40, 25)
# Of a small model 500 MiB of context would be nearly all, and so would the workspaces of cuBLAS on an H100.
CARD, CONTEXT_BYTES = "a100-80gb", 32 * MIB
REFUSED = 3
OUTPUT = Path(__file__).parent / "results/simulated/phantom_budgets.json"
_SCRIPT = Path(__file__).with_name("phantom_budgets_script.py")
_SMALLEST = re.compile(r"the smallest feasible one is ([\d.]+ \w+)")
Row = dict[str, Any]


def run(folder: Path, model: str, budget_bytes: int | None) -> Row:
    """Returns what one run said: its steps' peaks, its digest and memwall's report."""
    said, report = folder / "said.json", folder / "report.json"
    report.unlink(missing_ok=True)
    said.unlink(missing_ok=True)
    memwall = [] if budget_bytes is None else ["-m", "memwall", "run", "--budget", str(budget_bytes)]
    options = [] if budget_bytes is None else ["--report", str(report)]
    command = [sys.executable, *memwall, *options, str(_SCRIPT), model, str(said)]
    settings = {
        "PHANTOM_CARD": CARD,
        "PHANTOM_CONTEXT_BYTES": str(CONTEXT_BYTES),
        "PHANTOM_NUMBERS": "1",
        "PHANTOM_ORDER": "lazy",
    }
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    found: Row = json.loads(said.read_text()) if said.exists() else {}
    found |= {"status": done.returncode, "said": done.stderr.strip()}
    if report.exists():
        found["report"] = json.loads(report.read_text())
    return found


def row_of(model: str, share: int | None, budget_bytes: int, plain: Row, found: Row) -> Row:
    """Returns the figures of one budget; a share of None is the smallest budget that a refusal told."""
    row: Row = {"model": model, "share_percent": share, "budget_bytes": budget_bytes, "status": found["status"]}
    if found["status"] == REFUSED or "report" not in found or "digest" not in found:
        told = _SMALLEST.search(found["said"])
        row["smallest_told_bytes"] = parse_size(told.group(1)) if told else None
        return {**row, "said": " ".join(found["said"].split())[:300]}
    steady, peak = found["peak_bytes"][-1], max(found["build_bytes"], *found["peak_bytes"])
    predicted = found["report"]["forecast"]["phases"]["steady_step"]["process_bytes"]
    return {
        **row,
        "predicted_bytes": predicted,
        "counted_bytes": steady,
        "prediction_error_percent": round(100 * (predicted - steady) / steady, 2),
        "build_bytes": found["build_bytes"],
        "first_step_bytes": found["peak_bytes"][0],
        "proving_step_bytes": found["peak_bytes"][1],
        "exceeded_bytes": max(0, peak - budget_bytes),
        "num_replans": found["report"]["measured"]["num_replans"],
        "is_digest_equal": found["digest"] == plain["digest"],
    }


def is_refused(row: Row) -> bool:
    return bool(row["status"] == REFUSED and row["share_percent"] is not None and row["smallest_told_bytes"])


def has_failed(row: Row) -> bool:
    """Tells whether a row must not be: a refusal may, unless it is of the budget that a refusal has told."""
    if "counted_bytes" not in row:
        return not is_refused(row)
    return bool(row["status"] or row["exceeded_bytes"] or not row["is_digest_equal"])


def rows_of(folder: Path, model: str, shares: Sequence[int]) -> list[Row]:
    """Runs one model plainly, under each share of its peak, and under the smallest budget that was told."""
    plain = run(folder, model, None)
    if "digest" not in plain:
        raise SystemExit(f"{model}: the plain run ended with status {plain['status']}: {plain['said'][-500:]}")
    peak_bytes = max(plain["peak_bytes"])
    rows = [{"model": model, "share_percent": 100, "counted_bytes": peak_bytes}]
    told_bytes = None
    for share in (*shares, None):
        budget_bytes = told_bytes if share is None else peak_bytes * share // 100
        if budget_bytes is None:
            continue
        row = row_of(model, share, budget_bytes, plain, run(folder, model, budget_bytes))
        told_bytes = row.get("smallest_told_bytes") or told_bytes
        rows.append(row)
        print(line(row), flush=True)
    return rows


def line(row: Row) -> str:
    """Returns a row of the table, in Markdown."""
    share = "smallest told" if row["share_percent"] is None else f"{row['share_percent']} %"
    start = f"| {row['model']} | {share} | {row['budget_bytes'] / MIB:.0f} | "
    if "counted_bytes" not in row:
        told = row["smallest_told_bytes"]
        return start + (
            f"refused; {told / MIB:.0f} told | | | | | | |"
            if is_refused(row)
            else f"FAILED: {row['said']} | | | | | | |"
        )
    build = f"{row['build_bytes'] / MIB:.0f}" if "build_bytes" in row else ""  # rows of an earlier call
    over = f"{row['exceeded_bytes'] / MIB:.1f} over" if row["exceeded_bytes"] else "kept"
    return start + (
        f"{row['predicted_bytes'] / MIB:.0f} | {row['counted_bytes'] / MIB:.0f} | "
        f"{row['prediction_error_percent']:+.1f} % | {build} | "
        f"{row['first_step_bytes'] / MIB:.0f} | {row['proving_step_bytes'] / MIB:.0f} | "
        f"{over}, weights {'equal' if row['is_digest_equal'] else 'OTHER'}"
        f"{'' if not row['status'] else ', status ' + str(row['status'])} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], metavar="MODEL")
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES)
    parser.add_argument("-o", "--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    models = arguments.models or MODELS
    old = json.loads(arguments.output.read_text())["rows"] if arguments.output.exists() else []
    rows = {model: [row for row in old if row["model"] == model] for model in MODELS}
    print(
        "| model | share of plain peak | budget MiB | predicted MiB | counted MiB | error | build | first | proving | |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"tag": "simulated", "device": f"phantom {CARD}", "context_bytes": CONTEXT_BYTES}
    with tempfile.TemporaryDirectory() as name:
        for model in models:
            rows[model] = rows_of(Path(name), model, arguments.shares)
            kept = [row for each in MODELS for row in rows[each]]
            arguments.output.write_text(json.dumps({**result, "rows": kept}, indent=1) + "\n")
    return int(any(has_failed(row) for row in kept if row["share_percent"] != 100))


if __name__ == "__main__":
    sys.exit(main())
