"""Runs each script of tests/compat free and under budgets, and prints the table of what held.

    python benchmarks/compat.py [NAME ...] [--out FILE]

Each script runs free first. Then it runs under 70 % of its free peak, and under the smallest budget that a refusal of
64 MiB names. Its memory is sampled from outside, over the whole process tree; its trained weights are compared bit by
bit with those of the free run. What did not hold is in the table, too.
"""

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "compat"))
from tree_memory import Observed, observed  # noqa: E402

SCRIPTS = ROOT / "tests" / "compat" / "scripts"
_MIB = 1 << 20


def told_budget(refused: Observed) -> str | None:
    """Returns the smallest budget that a refusal names; None where there was no refusal."""
    named = re.search(r"the smallest feasible one is ([\d.,]+ \w+)", refused.errors)
    return None if named is None or refused.status != 3 else named.group(1).replace(",", "")


def budget_bytes(text: str) -> int:
    """Returns the bytes of a size that was told."""
    from memwall.units import parse_size

    return parse_size(text)


def measured(script: Path) -> dict[str, Any]:
    """Returns a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = observed(script, folder=folder)
        row: dict[str, Any] = {"script": script.stem, "free_bytes": free.peak_bytes, "free_seconds": free.seconds}
        share = f"{free.peak_bytes * 7 // 10 // _MIB}MiB"
        told = told_budget(observed(script, folder=folder, budget="64MiB"))
        row["told"] = told
        for key, budget in (("share", share), ("told_run", told)):
            if budget is None:
                continue
            run = observed(script, folder=folder, budget=budget)
            row[key] = {
                "budget_bytes": budget_bytes(budget),
                "status": run.status,
                "peak_bytes": run.peak_bytes,
                "held": run.status == 0 and run.peak_bytes <= budget_bytes(budget),
                "equal": run.weights == free.weights != "",
                "seconds": run.seconds,
                "last_line": (run.errors.strip().splitlines() or [""])[-1],
            }
        return row


def cell(run: dict[str, Any] | None) -> str:
    """Returns what a run under a budget came to, in a cell of the table."""
    if run is None:
        return "none told"
    budget, peak = run["budget_bytes"] / _MIB, run["peak_bytes"] / _MIB
    if run["status"] == 3:
        return f"{budget:,.0f}: refused"
    ending = "held" if run["held"] else f"**not held** ({run['status']})"
    return f"{budget:,.0f}: {peak:,.0f}, {ending}{'' if run['equal'] else ', **other bits**'}"


def main() -> None:
    """Prints the table, and writes the rows to a file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    scripts = sorted(path for path in SCRIPTS.glob("*.py") if path.stem != "conftest")
    rows = []
    print("| script | free peak, MiB | 70 % of it: peak | smallest told: peak |\n| --- | --- | --- | --- |", flush=True)
    for script in scripts:
        if given.names and script.stem not in given.names:
            continue
        row = measured(script)
        rows.append(row)
        cells = cell(row.get("share")), cell(row.get("told_run"))
        print(f"| {script.stem} | {row['free_bytes'] / _MIB:,.0f} | {' | '.join(cells)} |", flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
