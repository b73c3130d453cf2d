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


def failure_page(
    error: OutOfMemoryError,
    *,
    words: Sequence[str],
    script: Sequence[str],
    is_launched: bool,
    plan: Plan | None,
    trace: Trace | None,
    peak_bytes: int,
    is_committed: bool,
) -> Page:
    """Returns what to show of a failure.

    Args:
        words: memwall's own, as the shell had them: `run` and its options; () where they are not known.
        script: what was run, with its arguments.
        is_launched: whether a launcher started this process, whose own words are not known.
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
    resumed = _resumed(words) if is_committed else list(words)
    ways = _ways_on(error, resumed, script, plan, can_go_on=is_committed, is_launched=is_launched)
    grids = [_compared(error, plan, peak_bytes), ways]
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


def _ways_on(
    error: OutOfMemoryError,
    words: Sequence[str],
    script: Sequence[str],
    plan: Plan | None,
    *,
    can_go_on: bool,
    is_launched: bool,
) -> Grid:
    """Shows the budgets that would do, each with its command."""
    start = ["-m", "memwall"] if is_launched else ["memwall"]

    def command(own: Sequence[str]) -> str:
        return shlex.join([*start, *own, *script]) if own else "-"

    rows = []
    if error.next_budget_bytes:
        rows.append(("plans for what could be had", error.next_budget_bytes))
    smallest = None if plan is None else plan.forecast.smallest_feasible_budget_bytes
    if smallest is not None and smallest != error.next_budget_bytes:
        rows.append(("the smallest budget with a plan", smallest))
    shown = [(what, format_bytes(size, rounding="up"), command(_with_budget(words, size))) for what, size in rows]
    has_plan = any(word.partition("=")[0] == "--plan" for word in words)  # which would be taken again as it is
    if can_go_on and error.next_budget_bytes and not has_plan:
        shown.insert(0, ("goes on from the last committed step", "as planned then", command(words)))
    nothing = ("no smaller budget has a plan: use a smaller batch and accumulate", "-", "-")
    return Grid(
        title="How to go on" + ", after the launcher's own words" * is_launched,
        columns=("what", "budget", "command"),
        rows=tuple(shown) or (nothing,),
        text_columns=(0, 2),
    )


def _with_budget(words: Sequence[str], budget_bytes: int) -> list[str]:
    """Returns memwall's own words with another budget, in whole MiB that a person can type, and without a plan."""
    kept = []
    rest = iter(words)
    for word in rest:
        name, is_whole, _ = word.partition("=")
        if name not in ("--budget", "--plan"):
            kept.append(word)
        elif not is_whole:
            next(rest, None)
    return _after_run(kept, "--budget", f"{-(-budget_bytes // (1 << 20))}MiB")


def _resumed(words: Sequence[str]) -> list[str]:
    """Returns the words that go on with what was committed."""
    return list(words) if "--resume" in words else _after_run(words, "--resume")


def _after_run(words: Sequence[str], *options: str) -> list[str]:
    """Returns the words with options more; none where they are not known."""
    if "run" not in words:
        return []
    place = list(words).index("run") + 1
    return [*words[:place], *options, *words[place:]]
