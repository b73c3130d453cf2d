"""Runs `memwall plan --curve`: what a step costs at other budgets, from the smallest that fits to the plain run's."""

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from memwall.errors import InfeasibleError

if TYPE_CHECKING:
    from memwall.planning.forecast import BudgetPoint
    from memwall.planning.planfile import Plan

_NUM_POINTS = 20

CurveOption = Annotated[
    bool, typer.Option("--curve", help=f"Also plan for {_NUM_POINTS} other budgets, and show what each step costs.")
]


def curve_of(made: "Plan", plan_for: Callable[[int], "Plan"]) -> tuple["BudgetPoint", ...]:
    """Returns the points of a curve, the smallest budget first, the plan's own among them.

    Args:
        made: the plan for the budget that was asked for.
        plan_for: returns the plan for so many bytes.
    """
    from rich.console import Console
    from rich.progress import track

    from memwall.apply.technique import tag_of
    from memwall.planning.forecast import BudgetPoint

    plans = {made.forecast.budget_bytes or 0: made}
    budgets = [budget for budget in _budgets(made) if budget not in plans]
    console = Console(stderr=True)
    for budget_bytes in track(budgets, "planning", console=console, transient=True, disable=not console.is_terminal):
        try:
            plans[budget_bytes] = plan_for(budget_bytes)
        except InfeasibleError:  # the smallest is told to the byte, and an evaluation may need more
            continue
    return tuple(
        BudgetPoint(
            budget_bytes=budget_bytes,
            process_bytes=plan.forecast.peak.process_bytes,
            step_seconds=plan.forecast.step_seconds,
            num_actions=dict(Counter(tag_of(action) for action in plan.actions)),
        )
        for budget_bytes, plan in sorted(plans.items())
        if plan.forecast.fits
    )


def _budgets(made: "Plan") -> list[int]:
    """Returns budgets at equal distances, from the smallest that fits to one under which nothing needs to be done."""
    forecast = made.forecast
    most_bytes = (forecast.plain_peak or forecast.peak).process_bytes + 2 * forecast.margin_bytes
    least_bytes = min(forecast.smallest_feasible_budget_bytes or most_bytes, most_bytes)
    distance = (most_bytes - least_bytes) / (_NUM_POINTS - 1)
    return sorted({round(least_bytes + i * distance) for i in range(_NUM_POINTS)})
