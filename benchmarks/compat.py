"""Runs each script of tests/compat free and under budgets, and writes what held.

    python benchmarks/compat.py [NAME ...]

Each script runs free first. Then it runs under 70 % of its free peak, and under the smallest budget that a refusal of
64 MiB names; where that is refused later, as when a longer batch came, under the one that this refusal names. Its
memory is sampled from outside, over the whole process tree; its trained weights are compared bit by bit with those of
the free run. What did not hold is in the table, too; a script that the time limit ends has no new row. Each row goes to
results/cpu/compat.json as soon as it is there, and docs/scripts.md is written anew from all of them.
"""

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "compat"))
from revision import commit  # noqa: E402
from tree_memory import Observed, TimeLimitError, observed  # noqa: E402

SCRIPTS = ROOT / "tests" / "compat" / "scripts"
OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "compat.json"
PAGE = ROOT / "docs" / "scripts.md"
_MIB = 1 << 20
_MOST_REFUSALS = 4
"""Refusals that are followed: a person who is told a fourth number will not believe it."""
_INTRODUCTION = """# Scripts of many kinds

`make compat` runs each script of `tests/compat/scripts` as it is: free, under 70 % of its free peak, and under the
smallest budget that a refusal of 64 MiB names. A run under that which meets a longer batch, or trains parameters that
were frozen before, may be refused again, and is then repeated under the number that this refusal names. Peaks are the
resident memory of the whole process tree in MiB, sampled from outside every 20 ms.

*Held* means exit status 0, no sample above the budget, and, unless it says otherwise, the weights of the free run, bit
for bit. A budget may be passed between two samples, which memwall, but not the sampling, sees: that ends with status 5,
and is not held. Each row's commit stands in `benchmarks/results/cpu/compat.json`.

{summary}

{table}

{kinds}
"""


def told_budget(refused: Observed) -> str | None:
    """Returns the smallest budget that a refusal names; None where there was no refusal."""
    named = re.search(r"the smallest feasible one is ([\d.,]+ \w+)", refused.errors)
    return None if named is None or refused.status != 3 else named.group(1).replace(",", "")


def budget_bytes(text: str) -> int:
    """Returns the bytes of a size that was told."""
    from memwall.units import parse_size

    return parse_size(text)


def packages(script: Path) -> dict[str, str | None]:
    """Returns the frameworks that a script imports, by distribution, with their versions; None where not installed."""
    names = set()
    for node in ast.parse(script.read_text()).body:
        names |= {each.name for each in node.names} if isinstance(node, ast.Import) else set()
        names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
    found: dict[str, str | None] = {}
    for root in sorted({name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"torch"}):
        distribution = root.replace("_", "-")
        found[distribution] = importlib.metadata.version(distribution) if importlib.util.find_spec(root) else None
    return found


def missing_packages(script: Path) -> list[str]:
    """Returns what a script needs and is not installed."""
    return [name for name, version in packages(script).items() if version is None]


def measured(script: Path) -> dict[str, Any]:
    """Returns a row of the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        free = observed(script, folder=folder)
        row: dict[str, Any] = {"free_peak_bytes": free.peak_bytes, "free_seconds": round(free.seconds, 1)}
        share = f"{free.peak_bytes * 7 // 10 // _MIB}MiB"
        row["share"] = under_budget(share, observed(script, folder=folder, budget=share), free)
        told, num_refusals = told_budget(observed(script, folder=folder, budget="64MiB")), 1
        while told is not None and num_refusals <= _MOST_REFUSALS:
            run = observed(script, folder=folder, budget=told)
            row["told"] = under_budget(told, run, free) | {"num_refusals": num_refusals}
            told, num_refusals = told_budget(run), num_refusals + 1
        return row


def under_budget(budget: str, run: Observed, free: Observed) -> dict[str, Any]:
    """Returns what a run under a budget came to, beside the free one."""
    return {
        "budget_bytes": budget_bytes(budget),
        "exit_status": run.status,
        "peak_bytes": run.peak_bytes,
        "held": run.status == 0 and run.peak_bytes <= budget_bytes(budget),
        "equal": run.weights == free.weights != "",
        "seconds": round(run.seconds, 1),
    }


def is_kept(row: dict[str, Any]) -> bool:
    """Returns whether a script was held or refused at 70 %, and held under the budget that it was told, to equal bits.

    Where 70 % held, nothing needs to have been told.
    """
    share, told = row["share"], row.get("told")
    held = [run["held"] and run["equal"] for run in (share, told) if run is not None and run["exit_status"] != 3]
    is_told = told is None or told["exit_status"] != 3
    return bool(held) and all(held) and is_told


def page(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the text of docs/scripts.md."""
    lines = ["| script | free peak | 70 % of it: peak | smallest told: peak |", "| --- | --- | --- | --- |"]
    kinds = []
    for name, row in sorted(rows.items()):
        lines.append(line(name, row))
        first = (SCRIPTS / f"{name}.py").read_text().splitlines()[0].strip('"')
        with_versions = ", ".join(f"{each} {version}" for each, version in row.get("packages", {}).items())
        kinds.append(f"- `{name}`: {first}{f' ({with_versions})' if with_versions else ''}")
    kept = sum(is_kept(row) for row in rows.values())
    summary = f"Of {len(rows)} scripts {kept} were held, or refused at 70 % and then held at the budget that was told."
    again = sum(is_kept(row) and num_refusals(row.get("told")) > 1 for row in rows.values())
    if again:
        summary += f" {again} of them were refused a second time, and held at the number that was told then."
    missing = sorted({path.stem for path in SCRIPTS.glob("*.py")} - set(rows) - {"conftest"})
    if missing:
        summary += f" Not measured: {', '.join(missing)}."
    return _INTRODUCTION.format(summary=summary, table="\n".join(lines), kinds="\n".join(kinds))


def line(name: str, row: dict[str, Any]) -> str:
    """Returns a script's line of the table."""
    cells = cell(row.get("share")), cell(row.get("told"))
    return f"| {name} | {row['free_peak_bytes'] / _MIB:,.0f} | {' | '.join(cells)} |"


def cell(run: dict[str, Any] | None) -> str:
    """Returns what a run under a budget came to, in a cell of the table."""
    if run is None:
        return "none told"
    budget, peak = run["budget_bytes"] / _MIB, run["peak_bytes"] / _MIB
    if run["exit_status"] == 3:
        return f"{budget:,.0f}: refused"
    ending = "held" if run["held"] else f"**not held** (status {run['exit_status']})"
    if num_refusals(run) > 1:
        ending += f" after {num_refusals(run)} refusals"
    return f"{budget:,.0f}: {peak:,.0f}, {ending}{'' if run['equal'] else ', **other bits**'}"


def num_refusals(run: dict[str, Any] | None) -> int:
    """Returns how many refusals a run's budget was told by, one after the other; older rows followed one."""
    return 0 if run is None else int(run.get("num_refusals", 1))


def main() -> int:
    """Measures the scripts that are named, or all, and writes each row when it is there.

    Returns:
        1 where the time limit ended a run, whose script keeps the row that it had.
    """
    status = 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    import torch

    for script in sorted(SCRIPTS.glob("*.py")):
        if given.names and script.stem not in given.names:
            continue
        missing = missing_packages(script)
        if missing:
            print(f"{script.stem}: left out, not installed: {', '.join(missing)}", flush=True)
            continue
        try:
            row = measured(script) | {"packages": packages(script)}
        except TimeLimitError as error:
            print(f"{script.stem}: no new row: {error}", flush=True)
            status = 1
            continue
        row |= {"commit": commit(), "torch": torch.__version__, "machine": platform.machine()}
        record = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {"tag": "cpu-measured", "scripts": {}}
        record["scripts"][script.stem] = row
        OUTPUT.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(record["scripts"]))
        print(line(script.stem, row), flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
