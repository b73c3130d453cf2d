"""The page of a plan, or of a run under one: the step with and without it, and when each block is treated."""

from itertools import accumulate

from memwall.observe.run_report import RunReport
from memwall.planning.blocks import find_blocks
from memwall.planning.planfile import Plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.planning.technique import technique_of
from memwall.report.curves import Curve, curve_of
from memwall.report.grid import DASH, Grid, bytes_or_dash, seconds_or_dash
from memwall.report.html import Page
from memwall.trace.records import ModuleCall, Trace
from memwall.trace.steps import steady_step
from memwall.units import format_seconds

_MOST_ROWS = 128


def plan_page(title: str, plan: Plan | None, trace: Trace | None, run: RunReport | None = None) -> Page:
    """Returns the page of a plan and, once there is one, of its run.

    Args:
        plan: None where only the run's report is known.
        trace: of the step that the plan was made from; None where it is not at hand: nothing is drawn then.
        run: what was measured under the plan.
    """
    if plan is None or trace is None:
        return Page(title=title, plan=plan, run=run)
    measured_bytes = None if run is None else run.steady_peak_bytes
    schedule = schedule_grid(trace, plan)
    return Page(
        title=title,
        curves=plan_curves(trace, plan, process_peak_bytes=measured_bytes),
        plan=plan,
        run=run,
        schedules=(schedule,) if schedule.rows else (),
    )


def plan_curves(
    trace: Trace, plan: Plan, *, process_peak_bytes: int | None = None, plain_process_peak_bytes: int | None = None
) -> tuple[Curve, Curve]:
    """Returns the bytes over a step without the plan and with it, both simulated.

    Args:
        process_peak_bytes: what was measured under the plan; drawn as a line.
        plain_process_peak_bytes: what was measured without one.
    """
    return (
        curve_of(trace, steady_step(trace), "free run", "simulated", process_peak_bytes=plain_process_peak_bytes),
        curve_of(
            trace,
            step_under_plan(trace, plan),
            "under the plan",
            "simulated",
            budget_bytes=plan.forecast.budget_bytes or None,
            process_peak_bytes=process_peak_bytes,
        ),
    )


def schedule_grid(trace: Trace, plan: Plan) -> Grid:
    """Shows when each block runs forward and backward, and what the plan does with it between the two.

    Times are those of a step without the plan, of computing alone; "-" where the recording has none.
    """
    step = steady_step(trace)
    clock = [0.0, *accumulate(op.seconds for op in step.ops)]
    actions = {str(getattr(action, "block", "")): action for action in plan.actions}
    rows = []
    for block in find_blocks(trace, step)[:_MOST_ROWS]:
        call, action = block.calls[block.first_trained], actions.get(block.path)
        rows.append(
            (
                block.path,
                _span(clock, call.start, call.end),
                "kept" if action is None else technique_of(action).what(action),
                DASH if action is None else bytes_or_dash(action.saved_bytes),
                _backward_span(clock, call),
                DASH if action is None else seconds_or_dash(action.cost_seconds),
            )
        )
    return Grid(
        title="Schedule, by the clock of a step without the plan",
        columns=("block", "forward", "saved tensors", "frees", "backward", "costs then"),
        rows=tuple(rows),
        text_columns=(0, 2),
    )


def _backward_span(clock: list[float], call: ModuleCall) -> str:
    return DASH if call.backward_start < 0 else _span(clock, call.backward_start, call.backward_end)


def _span(clock: list[float], start: int, end: int) -> str:
    """Returns from when to when operations run."""
    return f"{format_seconds(clock[start])} to {format_seconds(clock[end])}" if clock[-1] else DASH
