"""memwall's planner against knobs and other planners, on simulated training steps: no model runs, no device is needed.

    python benchmarks/planner.py                                    # everything, minutes; writes result and README
    python benchmarks/planner.py --quick                            # four steps, seconds; writes nothing
    python benchmarks/planner.py --workload unet-17 --table h200    # one step

Every workload of `planner_models.py` is planned for on every cost table, at budgets of 90 to 10 % of the way from the
floor (the leaner of full recomputation with and without offload) to keeping everything, and where everything fits. One
simulator, which shares no code with the planner, judges every arm's orders. Ends with status 1 if memwall's plan, in
any cell, is over the budget, dearer than another arm's, further from its bound than 1 % of the step, slower to find
than 10 s of CPU time, or otherwise than forecast.
"""

import argparse
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from planner_arms import Forecast, Orders, Problem, knobs, memwall, planners
from planner_models import FEW_TABLES, TABLES, WORKLOADS, planned_step
from planner_report import provenance, summary, write_results
from planner_simulator import Outcome

SHARES_PERCENT = (100, 90, 70, 50, 30, 10)
"""Budgets on the way from the floor to keeping everything, which at 100 fits exactly."""
QUICK = (
    ("decoder-5", "rtx-4090"),
    ("decoder-24", "a100-no-tier"),
    ("unet-5", "a100-slow-nvme"),
    ("encoder-decoder", "h200"),
)
TOLERANCE_OF_STEP = 0.001
"""memwall's solver may stop this near its bound: a rival that is ahead by less is no better planner."""
MAX_GAP_OF_STEP = 0.01
MAX_CPU_SECONDS = 10.0

Planner = Callable[[Problem, int], Forecast | None]


def measure(workload: str, table: str, shares_percent: Sequence[int], planner: Planner = memwall) -> dict[str, Any]:
    """Plans one workload on one cost table at every budget.

    Returns:
        What the step needs plain and at least, and one cell per budget with all arms and the gates that failed.
    """
    problem = Problem(planned_step(workload, table))
    settings = knobs(problem)
    leanest = [problem.simulator.run(settings[arm][0].orders) for arm in ("full", "full+offload") if arm in settings]
    floor_bytes = min(outcome.peak_bytes for outcome in leanest)
    keep_all_bytes = problem.base.peak_bytes
    cells = []
    for share in shares_percent:
        budget_bytes = floor_bytes + (keep_all_bytes - floor_bytes) * share // 100
        arms = {arm: _swept(problem, offers, budget_bytes) for arm, offers in settings.items()}
        for arm, plan in planners().items():
            orders = plan(problem, budget_bytes)
            arms[arm] = None if orders is None else _judged(problem, "", orders)
        cells.append(_cell(problem, share, budget_bytes, arms, planner(problem, budget_bytes)))
    return {
        "workload": workload,
        "table": table,
        "num_blocks": len(problem.planned.blocks),
        "base_seconds": problem.base.step_seconds,
        "keep_all_bytes": keep_all_bytes,
        "floor_bytes": floor_bytes,
        "cells": cells,
    }


def _judged(problem: Problem, label: str, orders: Orders, window_bytes: int | None = None) -> dict[str, Any]:
    return _record(problem, label, problem.simulator.run(orders, window_bytes))


def _record(problem: Problem, label: str, outcome: Outcome) -> dict[str, Any]:
    record: dict[str, Any] = {"setting": label} if label else {}
    record |= {"peak_bytes": outcome.peak_bytes, "extra_seconds": problem.extra_seconds(outcome)}
    if outcome.moved_bytes:
        record |= {"moved_bytes": outcome.moved_bytes, "stall_seconds": outcome.stall_seconds}
    return record


def _swept(problem: Problem, offers: Iterable[Any], budget_bytes: int) -> dict[str, Any] | None:
    """The cheapest of a knob's settings that fit."""
    judged = [_judged(problem, offer.label, offer.orders) for offer in offers]
    fitting = [record for record in judged if record["peak_bytes"] <= budget_bytes]
    return min(fitting, key=lambda record: float(record["extra_seconds"]), default=None)


def _cell(
    problem: Problem,
    share: int,
    budget_bytes: int,
    arms: dict[str, dict[str, Any] | None],
    forecast: Forecast | None,
) -> dict[str, Any]:
    """One budget: all arms, memwall's forecast, and the gates it fails."""
    base_seconds = problem.base.step_seconds
    rivals = {arm: record for arm, record in arms.items() if record and record["peak_bytes"] <= budget_bytes}
    best_rival = min(rivals, key=lambda arm: float(rivals[arm]["extra_seconds"]), default=None)
    cell: dict[str, Any] = {
        "share_percent": share,
        "budget_bytes": budget_bytes,
        "best_rival": best_rival,
        "best_rival_seconds": None if best_rival is None else rivals[best_rival]["extra_seconds"],
        "arms": arms,
    }
    if forecast is None:
        arms["memwall"] = None
        return cell | {"failures": [] if best_rival is None else [f"no plan where {best_rival} fits"]}
    ours = arms["memwall"] = _judged(problem, "", forecast.orders, forecast.window_bytes)
    slack_seconds = TOLERANCE_OF_STEP * base_seconds
    gap_of_step = (forecast.extra_seconds - forecast.lower_bound_seconds) / base_seconds
    failures = {
        "over the budget": ours["peak_bytes"] > budget_bytes,
        f"dearer than {best_rival}": best_rival is not None
        and ours["extra_seconds"] > rivals[best_rival]["extra_seconds"] + slack_seconds,
        "not empty where all fits": share == 100 and bool(forecast.orders),
        "far from its bound": gap_of_step > MAX_GAP_OF_STEP,
        "slow to find": forecast.cpu_seconds > MAX_CPU_SECONDS,
        "peak forecast too low": ours["peak_bytes"] > forecast.peak_bytes,
        "seconds forecast too low": ours["extra_seconds"] > forecast.extra_seconds + slack_seconds,
    }
    return cell | {
        "forecast_peak_bytes": forecast.peak_bytes,
        "forecast_extra_seconds": forecast.extra_seconds,
        "lower_bound_seconds": forecast.lower_bound_seconds,
        "gap_of_step": gap_of_step,
        "cpu_seconds": forecast.cpu_seconds,
        "failures": [name for name, is_failure in failures.items() if is_failure],
    }


def failed_cells(steps: Iterable[dict[str, Any]]) -> list[str]:
    """One line for each cell in which a gate failed."""
    return [
        f"{step['workload']} on {step['table']} at {cell['share_percent']} %: {', '.join(cell['failures'])}"
        for step in steps
        for cell in step["cells"]
        if cell["failures"]
    ]


def main(arguments: Sequence[str] | None = None, planner: Planner = memwall) -> int:
    """Runs what the arguments ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", choices=list(WORKLOADS), help="default: all")
    parser.add_argument("--table", action="append", choices=list(TABLES), help="default: all")
    parser.add_argument("--shares", type=int, nargs="+", default=list(SHARES_PERCENT), help="budgets in percent")
    parser.add_argument("--quick", action="store_true", help="a small part; nothing is written")
    parser.add_argument("--output", type=Path, help="write the result here instead")
    options = parser.parse_args(arguments)
    pairs = [
        (workload, table)
        for workload in options.workload or WORKLOADS
        for table in options.table or FEW_TABLES.get(workload, TABLES)
    ]
    is_part = options.quick or options.workload or options.table or options.shares != list(SHARES_PERCENT)
    start, steps = time.perf_counter(), []
    for workload, table in QUICK if options.quick else pairs:
        begin = time.perf_counter()
        steps.append(measure(workload, table, options.shares, planner))
        print(f"{workload} on {table}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
    result = provenance() | {
        "tolerance_of_step": TOLERANCE_OF_STEP,
        "wall_seconds": time.perf_counter() - start,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "steps": steps,
    }
    print(summary(result))
    write_results(result, options.output, is_published=not is_part)
    failures = failed_cells(steps)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
