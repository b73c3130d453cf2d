"""Scores, tables and files of `planner.py`."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import knob_report

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "simulated" / "planner.json"
README = FOLDER / "README.md"
BEGIN, END = "<!-- planner: begin -->", "<!-- planner: end -->"
HEADING = "## The planner alone, simulated"
NOTE = (
    "`python benchmarks/planner.py`. Score: lower bound by step time, 0 without a plan that fits; knobs get their best "
    "setting. Every arm of every cell is in `results/simulated/planner.json`."
)

Cell = tuple[dict[str, Any], dict[str, Any]]
"""A step (workload on a table) and one of its budgets."""


def provenance() -> dict[str, Any]:
    """Returns what is needed to reproduce or compare a result."""
    return knob_report.provenance() | {"schema": "memwall.benchmarks.planner/1", "tag": "simulated"}


def _cells(result: dict[str, Any]) -> Iterator[Cell]:
    for step in result["steps"]:
        for cell in step["cells"]:
            yield step, cell


def score(step: dict[str, Any], cell: dict[str, Any], arm: str) -> float:
    """Reference step time by the arm's; 0 where it has no answer or one over the budget.

    The reference is memwall's lower bound, or the cheapest answer found if the executor is better than the bound says.
    """
    record = cell["arms"].get(arm)
    if record is None or record["peak_bytes"] > cell["budget_bytes"]:
        return 0.0
    fitting = [r["extra_seconds"] for r in cell["arms"].values() if r and r["peak_bytes"] <= cell["budget_bytes"]]
    reference = min(fitting)
    if cell.get("lower_bound_seconds", 0.0) > 0.0:
        reference = min(reference, cell["lower_bound_seconds"])
    return float((step["base_seconds"] + reference) / (step["base_seconds"] + record["extra_seconds"]))


def arm_table(result: dict[str, Any]) -> str:
    """Returns each arm's mean score and how often it had an answer, as a Markdown table."""
    lines = ["| arm | mean score | where it fits | cells in which it fits | over the budget | no answer |"]
    lines.append("|" + " --- |" * 6)
    cells = list(_cells(result))
    arms = list(dict.fromkeys(arm for _, cell in cells for arm in cell["arms"]))
    scores = {arm: statistics.mean(score(step, cell, arm) for step, cell in cells) for arm in arms}
    for arm in sorted(arms, key=lambda arm: -scores[arm]):
        records = [cell["arms"].get(arm) for _, cell in cells]
        over = sum(
            record is not None and record["peak_bytes"] > cell["budget_bytes"]
            for record, (_, cell) in zip(records, cells, strict=True)
        )
        missing = sum(record is None for record in records)
        fitting = len(cells) - over - missing
        where_fitting = scores[arm] * len(cells) / max(1, fitting)
        lines.append(
            f"| {arm} | {scores[arm]:.3f} | {where_fitting:.3f} | {fitting} of {len(cells)} | {over} | {missing} |"
        )
    return "\n".join(lines)


def workload_table(result: dict[str, Any]) -> str:
    """Returns memwall by workload: against the best other arm, its bound, its forecast, and the time it takes."""
    lines = [
        "| workload | blocks | step / best other arm's | worst gap to bound | peak forecast | slowest plan | lost |",
        "|" + " --- |" * 7,
    ]
    for workload in dict.fromkeys(step["workload"] for step in result["steps"]):
        own = [(step, cell) for step, cell in _cells(result) if step["workload"] == workload]
        planned = [(step, cell) for step, cell in own if cell["arms"]["memwall"] is not None]
        ratios = [
            (step["base_seconds"] + cell["arms"]["memwall"]["extra_seconds"])
            / (step["base_seconds"] + cell["best_rival_seconds"])
            for step, cell in planned
            if cell["best_rival"] is not None
        ]
        errors = [cell["forecast_peak_bytes"] / cell["arms"]["memwall"]["peak_bytes"] - 1 for _, cell in planned]
        gap = max((cell["gap_of_step"] for _, cell in planned), default=0.0)
        seconds = max((cell["cpu_seconds"] for _, cell in planned), default=0.0)
        lost = sum(bool(cell["failures"]) for _, cell in own)
        lines.append(
            f"| {workload} | {own[0][0]['num_blocks']} | {_span(ratios, '.3f')} | {gap:.2%} of step "
            f"| {_span(errors, '+.1%')} | {seconds:.1f} s | {lost} of {len(own)} |"
        )
    return "\n".join(lines)


def _span(values: list[float], form: str) -> str:
    return f"{min(values):{form}} to {max(values):{form}}" if values else "none"


def losing_table(result: dict[str, Any]) -> str:
    """Returns the cells in which a gate failed, as a Markdown table; a table without rows when there are none."""
    lines = ["| workload | table | share | best other arm | its extra | memwall's extra | |", "|" + " --- |" * 7]
    for step, cell in _cells(result):
        if not cell["failures"]:
            continue
        ours = cell["arms"]["memwall"]

        def of_step(seconds: float | None, base_seconds: float = step["base_seconds"]) -> str:
            return "" if seconds is None else f"{seconds / base_seconds:.2%}"

        lines.append(
            f"| {step['workload']} | {step['table']} | {cell['share_percent']} % | {cell['best_rival'] or 'none'} "
            f"| {of_step(cell['best_rival_seconds'])} | {of_step(ours and ours['extra_seconds'])} "
            f"| {', '.join(cell['failures'])} |"
        )
    return "\n".join(lines)


def summary(result: dict[str, Any]) -> str:
    """Returns one paragraph: cells won and lost, and what was run."""
    cells = [cell for _, cell in _cells(result)]
    lost = sum(bool(cell["failures"]) for cell in cells)
    over = sum("over the budget" in cell["failures"] for cell in cells)
    ahead = sum(
        cell["arms"]["memwall"] is not None
        and cell["best_rival"] is not None
        and cell["arms"]["memwall"]["extra_seconds"] > cell["best_rival_seconds"] + 1e-9
        for cell in cells
    )
    return (
        f"Simulated: no figure here was measured on a device. memwall passes every gate in {len(cells) - lost} of "
        f"{len(cells)} cells, {over} over budget; in {ahead} some arm is ahead at all (a gate fails from "
        f"{result['tolerance_of_step']:.1%} of the step on). {result['wall_seconds']:.0f} s and "
        f"{result['peak_rss_bytes'] / 2**30:.1f} GiB on one core, torch {result['versions']['torch']}, highspy "
        f"{result['versions']['highspy']}, commit {result['commit'][:12]}"
        f"{' with changes' if result['has_uncommitted_changes'] else ''}."
    )


def write_results(result: dict[str, Any], output: Path | None, is_published: bool) -> None:
    """Prints the tables; writes the JSON to `output`, or if published to the results folder, and then the README."""
    tables = (arm_table(result), workload_table(result), f"Cells in which a gate failed:\n\n{losing_table(result)}")
    print(*tables, sep="\n\n")
    path = output or (RESULT if is_published else None)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(result))
    if is_published and output is None:
        README.write_text(with_section(README.read_text(), "\n\n".join((summary(result), NOTE, *tables))))


def as_json(result: dict[str, Any]) -> str:
    """Returns the result as JSON with one line per budget; seconds to a microsecond."""
    head = {key: value for key, value in result.items() if key != "steps"}
    lines = [json.dumps(head, indent=1)[:-2] + ',\n "steps": [']
    for number, step in enumerate(result["steps"]):
        opening = json.dumps(_rounded({key: value for key, value in step.items() if key != "cells"}))[:-1]
        cells = ",\n   ".join(json.dumps(_rounded(cell)) for cell in step["cells"])
        comma = "," if number + 1 < len(result["steps"]) else ""
        lines.append(f'  {opening}, "cells": [\n   {cells}]}}{comma}')
    return "\n".join([*lines, " ]", "}", ""])


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 6) if isinstance(value, float) else value


def with_section(page: str, text: str) -> str:
    """Returns the page with this benchmark's section replaced, or added at its end; all else as it was."""
    if BEGIN not in page or END not in page:
        page = f"{page.rstrip()}\n\n{HEADING}\n\n{BEGIN}\n{END}\n"
    before, rest = page.split(BEGIN, 1)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}"
