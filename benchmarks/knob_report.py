"""Scores and tables of `knobs.py`: which knob fits each budget best, and how memwall compares."""

import json
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from revision import git

FOLDER = Path(__file__).parent
HEAP = "+heap"
"""Ends the name of an arm whose tensors live in memwall's heap, without a plan."""
RESULT = FOLDER / "results" / "cpu" / "knobs.json"
README = FOLDER / "README.md"
BEGIN, END = "<!-- knobs: begin -->", "<!-- knobs: end -->"

MAX_TIME_RATIO = 1.02
"""memwall's median step time over that of the best knob that fits the same budget."""
MAX_TIME_RATIO_WHEN_FITTING = 1.01
"""memwall's median step time over plain PyTorch's when everything fits."""
MAX_PREDICTION_ERROR = 0.05


def provenance() -> dict[str, Any]:
    """Returns what is needed to reproduce or compare a result."""
    changes = git("status", "--porcelain")
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "schema": "memwall.benchmarks.knobs/1",
        "tag": "cpu-measured",
        "commit": git("rev-parse", "HEAD"),
        "has_uncommitted_changes": bool(changes),
        "cpu": model[1] if model else platform.processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "transformers", "torch-memwall", "highspy")},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def score(
    races: Sequence[Sequence[dict[str, Any]]], probes: Sequence[dict[str, Any]], budgets_bytes: Mapping[int, int]
) -> list[dict[str, Any]]:
    """Adds medians, quartiles and equality to each record; returns the noise floor, cells and arms of each race.

    Args:
        races: the records of each race; every one has all knobs, the first record is plain PyTorch's.
        probes: records of arms that ran alone before.
    """
    for race in races:
        for record in race:
            low, middle, high = statistics.quantiles(record["step_seconds"], n=4, method="inclusive")
            record["step_seconds_quartiles"] = [low, middle, high]
            record["step_seconds_median"] = middle
            record["time_ratio_to_plain"] = _paired_ratio(record, race[0])
            for key in ("losses", "weights_sha256", "buffers_sha256"):
                record[f"{key.removesuffix('_sha256')}_equal_plain"] = record[key] == race[0][key]
    highest_bytes: dict[str, int] = {}
    for record in (*probes, *(record for race in races for record in race)):
        highest_bytes[record["arm"]] = max(highest_bytes.get(record["arm"], 0), record["peak_bytes"])
    has_plans = any(record["budget_bytes"] is not None for race in races for record in race)
    heaps = [record for race in races for record in race if record["arm"].endswith(HEAP)]
    scored = []
    for race in races:
        knobs = [r for r in race if r["budget_bytes"] is None and not r["arm"].endswith(HEAP)]
        plans = {r["arm"]: r for r in race if r["budget_bytes"] is not None}
        cells = []
        # Without memwall, every budget gets a cell of what the knobs do.
        for share in (s for s in budgets_bytes if f"memwall-{s}" in plans or not has_plans):
            fitting = [k for k in knobs if highest_bytes[k["arm"]] <= budgets_bytes[share]]
            fitting_heaps = [h for h in heaps if highest_bytes[h["arm"]] <= budgets_bytes[share]]
            plan = plans.get(f"memwall-{share}")
            cells.append(_cell(share, budgets_bytes[share], fitting, fitting_heaps, plan, race[0]))
        scored.append({"noise_ratio": _paired_ratio(race[1], race[0]), "cells": cells, "arms": race})
    return scored


def _paired_ratio(record: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the median over rounds of the ratio of two step times; slow drift of the machine cancels."""
    pairs = zip(record["step_seconds"], other["step_seconds"], strict=True)
    return statistics.median(float(ours / theirs) for ours, theirs in pairs)


def _cell(
    share_percent: int,
    budget_bytes: int,
    fitting: Sequence[dict[str, Any]],
    fitting_heaps: Sequence[dict[str, Any]],
    memwall: dict[str, Any] | None,
    plain: dict[str, Any],
) -> dict[str, Any]:
    best = min(fitting, key=lambda knob: knob["step_seconds_median"], default=None)
    best_heap = min(fitting_heaps, key=lambda knob: knob["time_ratio_to_plain"], default=None)
    cell: dict[str, Any] = {
        "share_percent": share_percent,
        "budget_bytes": budget_bytes,
        "best_knob": best and best["arm"],
        "best_knob_seconds": best and best["step_seconds_median"],
        "best_knob_peak_bytes": best and best["peak_bytes"],
    }
    if memwall is None:
        return cell
    # The budget binds the whole run, its recorded first step too; the forecast is of the steps under the plan.
    peak_bytes, predicted_bytes = memwall["planned_peak_bytes"], memwall["predicted_peak_bytes"]
    ratio = memwall["step_seconds_median"] / best["step_seconds_median"] if best else None
    ratio_to_plain = memwall["step_seconds_median"] / plain["step_seconds_median"]
    failures = {
        "over budget": memwall["peak_bytes"] > budget_bytes,
        "slower than a knob": ratio is not None and ratio > MAX_TIME_RATIO,
        "slower than plain": share_percent > 100 and ratio_to_plain > MAX_TIME_RATIO_WHEN_FITTING,
        "prediction off": abs(predicted_bytes - peak_bytes) > MAX_PREDICTION_ERROR * peak_bytes,
        # A plan made again holds what was measured: its own forecast proves nothing.
        "predicted too low": predicted_bytes + memwall["margin_bytes"] < peak_bytes or memwall["num_replans"] > 0,
        "other weights": not memwall["weights_equal_plain"],
        "other buffers": not memwall["buffers_equal_plain"],
    }
    return cell | {
        "memwall_seconds": memwall["step_seconds_median"],
        "memwall_peak_bytes": peak_bytes,
        "memwall_predicted_bytes": predicted_bytes,
        "memwall_margin_bytes": memwall["margin_bytes"],
        "memwall_bytes_moved": memwall["bytes_moved"],
        "slack": (budget_bytes - peak_bytes) / budget_bytes,
        "prediction_error": (predicted_bytes - peak_bytes) / peak_bytes,
        "time_ratio": ratio,
        "paired_time_ratio": best and _paired_ratio(memwall, best),
        "time_ratio_to_plain": _paired_ratio(memwall, plain),
        "best_heap_knob": best_heap and best_heap["arm"],
        # They may have run in different races, each beside a plain arm.
        "time_ratio_to_heap_knob": best_heap and _paired_ratio(memwall, plain) / best_heap["time_ratio_to_plain"],
        "failures": [name for name, is_failure in failures.items() if is_failure],
    }


def _mib(num_bytes: int | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def knob_table(result: dict[str, Any]) -> str:
    """Returns what each arm did, as a Markdown table."""
    lines = ["| workload | arm | step s (quartiles) | x plain | peak MiB | moved MiB | same weights | same buffers |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for workload in result["workloads"]:
        for arm in (arm for race in workload["races"] for arm in race["arms"]):
            low, middle, high = arm["step_seconds_quartiles"]
            lines.append(
                f"| {workload['workload']} | {arm['arm']} | {middle:.3f} ({low:.3f}-{high:.3f}) "
                f"| {arm['time_ratio_to_plain']:.3f} | {_mib(arm['peak_bytes'])} | {_mib(arm['bytes_moved'])} "
                f"| {_yes(arm['weights_equal_plain'])} | {_yes(arm['buffers_equal_plain'])} |"
            )
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def cell_table(result: dict[str, Any]) -> str:
    """Returns memwall against the best knob of every cell, as a Markdown table; losing cells name what failed."""
    lines = [
        "| workload | share | budget MiB | best knob that fits | its s | memwall s | ratio "
        "| to best knob with heap | peak MiB | predicted | |"
    ]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for workload in result["workloads"]:
        for cell in (cell for race in workload["races"] for cell in race["cells"]):
            seconds = cell["best_knob_seconds"]
            row = f"| {workload['workload']} | {cell['share_percent']} % | {_mib(cell['budget_bytes'])} "
            row += f"| {cell['best_knob'] or 'none'} | {'' if seconds is None else f'{seconds:.3f}'} "
            if "memwall_seconds" in cell:
                ratio, failures = cell["time_ratio"], cell["failures"]
                heap_ratio = cell["time_ratio_to_heap_knob"]
                row += f"| {cell['memwall_seconds']:.3f} | {'' if ratio is None else f'{ratio:.3f}'} "
                row += f"| {'none fits' if heap_ratio is None else f'{heap_ratio:.3f}'} "
                row += f"| {_mib(cell['memwall_peak_bytes'])} | {cell['prediction_error']:+.1%} "
                row += f"| {', '.join(failures) or 'ok'} |"
            else:
                row += "| | | | | | |"
            lines.append(row)
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> str:
    """Returns one paragraph: cells won, lost and how, and the noise floor."""
    races = [(workload["workload"], race) for workload in result["workloads"] for race in workload["races"]]
    cells = [cell for _, race in races for cell in race["cells"] if "failures" in cell]
    noise = ", ".join(f"{name} {race['noise_ratio'] - 1:+.1%}" for name, race in races)
    counts = "memwall left out"
    if cells:
        passed = sum(not cell["failures"] for cell in cells)
        over = sum("over budget" in cell["failures"] for cell in cells)
        alone = sum(cell["best_knob"] is None for cell in cells)
        counts = f"{passed} of {len(cells)} cells pass every gate; {over} over budget; in {alone} no knob fits"
    return (
        f"{counts}. Two identical plain arms differ by {noise}. torch {result['versions']['torch']}, {result['cpu']}, "
        f"commit {result['commit'][:12]}{' with changes' if result['has_uncommitted_changes'] else ''}."
    )


def write_results(result: dict[str, Any], output: Path | None, is_published: bool) -> None:
    """Prints the tables; writes the JSON to `output`, or if published to the results folder, and then the README."""
    print(knob_table(result), cell_table(result), summary(result), sep="\n\n")
    path = output or (RESULT if is_published else None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
    if is_published:
        _write_readme(f"{summary(result)}\n\n{cell_table(result)}")


def _write_readme(text: str) -> None:
    section = f"{BEGIN}\n{text}\n{END}"
    page = (
        README.read_text() if README.exists() else f"# Benchmarks\n\n## memwall against the knobs\n\n{BEGIN}\n{END}\n"
    )
    if BEGIN not in page or END not in page:
        page += f"\n## memwall against the knobs\n\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN, 1)
    README.write_text(before + section + rest.split(END, 1)[1])
