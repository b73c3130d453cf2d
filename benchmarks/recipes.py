"""Runs recipes at their own size, plain and as their pages say, and writes what that costs.

    python benchmarks/recipes.py [NAME ...]

Memory is sampled from outside, over the whole process tree; a step's seconds are those that the script prints, the
median of all but the first two. The trained weights are compared bit by bit. Each row goes to results/cpu/recipes.json
as soon as it is there, and into the recipe's page.
"""

import argparse
import hashlib
import json
import platform
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "compat"))
from tree_memory import Observed, observed  # noqa: E402

RECIPES = ROOT / "recipes"
OUTPUT = ROOT / "benchmarks" / "results" / "cpu" / "recipes.json"
_MIB = 1 << 20
_HEADING = "## What it costs"


def results() -> dict[str, dict[str, Any]]:
    """Returns what was measured so far, by recipe."""
    found: dict[str, dict[str, Any]] = json.loads(OUTPUT.read_text())["recipes"] if OUTPUT.exists() else {}
    return found


def budget_of(recipe: Path) -> str | None:
    """Returns the budget of the command on a recipe's page; None where it runs without `memwall run`, and has none."""
    named = re.search(r"^memwall run --budget (\S+) train.py$", (recipe / "README.md").read_text(), flags=re.MULTILINE)
    return named and named.group(1)


def is_forecast(recipe: Path) -> bool:
    """Returns whether a recipe is for a device that is not here."""
    return (recipe / "config.json").exists()


def measured(recipe: Path) -> dict[str, Any]:
    """Returns a recipe's row: the plain script, and what its page shows."""
    budget = budget_of(recipe)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Without a budget the page shows what the script does with memwall's Python, and --plain what torch's does.
        plain, plain_weights = _run(recipe, folder / "plain", None, *([] if budget else ["--plain"]))
        planned, weights = _run(recipe, folder / "planned", budget)
    row: dict[str, Any] = {"plain": _figures(plain), "planned": _figures(planned)}
    if budget is not None:
        row["budget"] = budget
    return row | {"equal_weights": plain_weights == weights}


def _run(recipe: Path, folder: Path, budget: str | None, *arguments: str) -> tuple[Observed, str]:
    """Runs a recipe in a folder of its own; returns what was seen, and a digest of what it trained."""
    folder.mkdir()
    found = observed(recipe / "train.py", folder=folder, budget=budget, arguments=arguments)
    if found.status != 0:
        raise SystemExit(f"{recipe.name}: status {found.status}\n{found.errors[-2000:]}")
    (weights,) = folder.glob("*.pt")
    return found, _digest(weights)


def _digest(path: Path) -> str:
    import torch

    digest = hashlib.sha256()

    def add(value: Any, where: str) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                add(value[key], f"{where}.{key}")
        else:
            digest.update(where.encode())
            digest.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())

    add(torch.load(path), "")
    return digest.hexdigest()


def _figures(found: Observed) -> dict[str, float]:
    seconds = [float(text) for text in re.findall(r"^step \d+: loss .*, ([\d.]+) s", found.output, flags=re.MULTILINE)]
    return {"peak_bytes": found.peak_bytes, "step_seconds": round(statistics.median(seconds[2:]), 3)}


def section(name: str, row: dict[str, Any]) -> str:
    """Returns the table of a recipe's page."""
    plain, planned = row["plain"], row["planned"]
    how = f"memwall run --budget {row['budget']}" if "budget" in row else "with memwall's table"

    def line(label: str, figures: dict[str, float]) -> str:
        bytes_ratio = figures["peak_bytes"] / plain["peak_bytes"]
        time_ratio = figures["step_seconds"] / plain["step_seconds"]
        return (
            f"| {label} | {figures['peak_bytes'] / _MIB:,.0f} MiB | {bytes_ratio:.2f} "
            f"| {figures['step_seconds']:.2f} s | {time_ratio:.2f} |"
        )

    return "\n".join(
        [
            "| run | most memory | of plain | step | of plain |",
            "| --- | --- | --- | --- | --- |",
            line("plain", plain),
            line(how, planned),
            "",
            f"`python benchmarks/recipes.py {name}`, one thread of {row['processor']}, torch {row['torch']}; weights "
            + ("equal bit for bit." if row["equal_weights"] else "**not equal**."),
        ]
    )


def write_page(name: str, row: dict[str, Any]) -> None:
    """Puts the table at the end of a recipe's page, after what is said of exactness."""
    path = RECIPES / name / "README.md"
    before, heading, after = path.read_text().partition(_HEADING)
    said = re.split(r"^(?:\||Bytes and seconds have not)", after, maxsplit=1, flags=re.MULTILINE)[0].rstrip()
    path.write_text(f"{before}{heading}{said}\n\n{section(name, row)}\n")


def _processor() -> str:
    names = re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())
    return re.sub(r" \d+-Core Processor", "", names[0]) if names else platform.machine()


def main() -> None:
    """Measures the recipes that are named, or all that run here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    import torch

    for recipe in sorted(path.parent for path in RECIPES.glob("*/train.py")):
        if is_forecast(recipe) or (given.names and recipe.name not in given.names):
            continue
        commit = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        about = {"commit": commit.stdout.strip(), "torch": torch.__version__.split("+")[0], "processor": _processor()}
        row = measured(recipe) | about
        rows = results() | {recipe.name: row}
        OUTPUT.write_text(json.dumps({"tag": "cpu-measured", "recipes": rows}, indent=1, sort_keys=True) + "\n")
        write_page(recipe.name, rows[recipe.name])
        print(recipe.name, section(recipe.name, rows[recipe.name]), sep="\n", flush=True)


if __name__ == "__main__":
    main()
