"""The page of a run that has run out of memory: what held the peak, forecast and measurement, and how to go on."""

import shlex
from collections.abc import Sequence

from memwall.errors import OutOfMemoryError
from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.report.curves import Curve, curve_of
from memwall.report.grid import Grid, bytes_or_dash
from memwall.report.html import Card, Page
from memwall.report.plan_grids import action_grid, forecast_phase_grid, lever_grid
from memwall.trace.records import Trace
from memwall.units import format_bytes

__all__ = ["failure_page"]


def failure_page(
    error: OutOfMemoryError,
    *,
    command: Sequence[str],
    plan: Plan | None,
    trace: Trace | None,
    peak_bytes: int,
    is_committed: bool,
) -> Page:
    """Returns what to show of a failure.

    Args:
        command: what was started, as the shell had it.
        plan: the one in effect; None before there was one.
        trace: of the step that the plan was made from; None where none was recorded.
        peak_bytes: the most that the process held in a whole step under the plan; 0 where none was complete.
        is_committed: whether the run can be resumed.
    """
    forecast = None if plan is None else plan.forecast
    curves: tuple[Curve, ...] = ()
    if plan is not None and trace is not None:
        curve = curve_of(
            trace,
            step_under_plan(trace, plan),
            "a step under the plan",
            "simulated",
            budget_bytes=plan.forecast.budget_bytes,
            process_peak_bytes=error.held_bytes,
            has_times=False,
        )
        curves = (curve,)
    grids = [_compared(error, plan, peak_bytes), _ways_on(error, command, plan, is_committed=is_committed)]
    if plan is not None and forecast is not None:
        grids += [action_grid(plan.actions), *([lever_grid(forecast.levers)] if forecast.levers else ())]
        grids.append(forecast_phase_grid(forecast))
    asked = format_bytes(error.asked_bytes, rounding="up") if error.asked_bytes else "not said"
    return Page(
        title=f"Out of memory in {error.phase}",
        verdict=("does-not-fit", str(error)),
        cards=(
            Card("asked for", asked, "could not be had"),
            Card("held", format_bytes(error.held_bytes, rounding="up"), f"at most, in {error.phase}"),
        ),
        curves=curves,
        curves_title="Memory over one step, as foreseen",
        grids=tuple(grids),
        notes=("What held the peak is that of a step under the plan, simulated from the recorded one.",) * bool(curves),
    )


def _compared(error: OutOfMemoryError, plan: Plan | None, peak_bytes: int) -> Grid:
    """Shows what was foreseen and what was held."""
    foreseen = None if plan is None else plan.forecast.steady_process_bytes
    rows = [
        ("a step, foreseen", bytes_or_dash(foreseen)),
        ("its margin", bytes_or_dash(None if plan is None else plan.forecast.margin_bytes)),
        ("whole steps, measured", bytes_or_dash(peak_bytes or None)),
        (f"held in {error.phase} when memory ran out", format_bytes(error.held_bytes)),
        ("asked for then", bytes_or_dash(error.asked_bytes or None)),
        ("budget", bytes_or_dash(None if plan is None else plan.forecast.budget_bytes)),
    ]
    return Grid(title="Foreseen and measured", columns=("", "bytes of the process"), rows=tuple(rows))


def _ways_on(error: OutOfMemoryError, command: Sequence[str], plan: Plan | None, *, is_committed: bool) -> Grid:
    """Shows the budgets that would do, each with its command."""
    rows = []
    if error.next_budget_bytes:
        rows.append(("plans for what could be had", error.next_budget_bytes))
    smallest = None if plan is None else plan.forecast.smallest_feasible_budget_bytes
    if smallest is not None and smallest != error.next_budget_bytes:
        rows.append(("the smallest budget with a plan", smallest))
    base = _resumed(command) if is_committed else list(command)
    shown = [(what, format_bytes(size, rounding="up"), _with_budget(base, size)) for what, size in rows]
    if is_committed and error.next_budget_bytes:
        shown.insert(0, ("goes on from the last committed step", "as planned then", shlex.join(base)))
    nothing = ("no smaller budget has a plan: use a smaller batch and accumulate", "-", "-")
    return Grid(
        title="How to go on",
        columns=("what", "budget", "command"),
        rows=tuple(shown) or (nothing,),
        text_columns=(0, 2),
    )


def _with_budget(command: Sequence[str], budget_bytes: int) -> str:
    """Returns the command with another budget, in whole MiB, so that a person can type it."""
    size = f"{-(-budget_bytes // (1 << 20))}MiB"
    words = list(command)
    for place, word in enumerate(words):
        if word == "--budget":
            words[place + 1] = size
            break
        if word.startswith("--budget="):
            words[place] = f"--budget={size}"
            break
    return shlex.join(words)


def _resumed(command: Sequence[str]) -> list[str]:
    """Returns the command that goes on with what was committed."""
    place = list(command).index("run") + 1
    return list(command) if "--resume" in command else [*command[:place], "--resume", *command[place:]]
