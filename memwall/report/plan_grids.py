"""Shows a plan as tables: its figures, its actions with equal blocks drawn together, its phases."""

import math
from collections.abc import Sequence
from typing import Literal

from memwall.planning.action import Action
from memwall.planning.forecast import Forecast, Lever, PeakBytes
from memwall.planning.planfile import Plan
from memwall.planning.technique import alike, technique_of
from memwall.predict.link_time import LinkTime
from memwall.report.estimate_grids import allocator_facts, route_row, workload_row
from memwall.report.grid import DASH, Grid, bytes_or_dash, ratio_text, seconds_or_dash, share_percent
from memwall.units import format_bytes, format_seconds

PLACES = {
    "allocated_bytes": "tensors",
    "reserved_bytes": "reserved",
    "process_bytes": "process",
    "host_bytes": "host",
    "disk_bytes": "disk",
}
"""Names the fields of `PeakBytes` in tables, in their order."""
Fit = Literal["fits", "inside-margin", "does-not-fit", "no-budget"]

# In the order in which they happen; a run is resumed after it was saved.
_PHASES = ("build", "first_step", "steady_step", "accumulation", "eval", "save", "resume")


def fit_of(forecast: Forecast) -> Fit:
    """Says what the forecast means for its budget."""
    if forecast.budget_bytes is None or forecast.fits is None:
        return "no-budget"
    if forecast.fits:
        return "fits"
    return "inside-margin" if forecast.peak.process_bytes <= forecast.budget_bytes else "does-not-fit"


def plan_facts(plan: Plan) -> tuple[tuple[str, str], ...]:
    """Returns the plan's figures as (name, value)."""
    forecast = plan.forecast
    peak_bytes = forecast.peak.process_bytes
    peak_text = format_bytes(peak_bytes, rounding="up")
    if forecast.budget_bytes is not None:
        peak_text += f" ({share_percent(peak_bytes, forecast.budget_bytes)} of the budget)"
    facts = [
        *workload_row(forecast.workload),
        ("budget", bytes_or_dash(forecast.budget_bytes, rounding="down")),
        ("predicted process peak", peak_text),
        ("margin", format_bytes(forecast.margin_bytes)),
    ]
    if forecast.plain_peak is not None:
        facts.append(("peak without the plan", format_bytes(forecast.plain_peak.process_bytes, rounding="up")))
    smallest_bytes = forecast.smallest_feasible_budget_bytes
    smallest_text = DASH if smallest_bytes is None else format_bytes(smallest_bytes, rounding="up")
    facts.append(("smallest feasible budget", smallest_text))
    step_text = seconds_or_dash(forecast.step_seconds)
    if forecast.step_seconds is not None and forecast.plain_step_seconds:
        ratio = ratio_text(forecast.step_seconds, forecast.plain_step_seconds)
        step_text += f" ({ratio} the plain {format_seconds(forecast.plain_step_seconds)})"
    facts.append(("predicted step", step_text))
    facts.append(("bytes moved per step", format_bytes(forecast.moved_bytes_per_step)))
    facts += _link_facts(forecast.link, plan.micro_batch * plan.num_micro_batches)
    if plan.micro_batch:
        samples = plan.micro_batch * plan.num_micro_batches
        facts.append(("batch", f"{plan.num_micro_batches} x {plan.micro_batch} = {samples} samples"))
    facts += [*allocator_facts(forecast.allocator), *route_row(forecast)]
    facts.append(("what binds", "; ".join(forecast.binding) or "nothing"))
    return tuple(facts)


def _link_facts(link: LinkTime | None, num_samples: int) -> list[tuple[str, str]]:
    """Says what moving takes beside computing, and from which batch on it can be hidden."""
    if link is None:
        return []
    tier = "disk" if link.tier == "disk" else "host memory"
    bounds = (
        f"{format_seconds(link.compute_seconds)} computing, {format_seconds(link.moving_seconds)} moving: "
        f"{format_seconds(link.ideal_seconds)} if one hides the other, {format_seconds(link.serial_seconds)} if not"
    )
    hiding = link.hiding_samples(num_samples)
    if num_samples and 0 < hiding < float("inf"):
        bounds += f"; computing takes longer from {math.ceil(hiding):,} samples a step on, {num_samples:,} now"
    return [
        (
            f"through {tier}",
            f"{format_bytes(link.written_bytes)} written, {format_bytes(link.read_bytes)} read in a step, at "
            f"{format_bytes(link.write_bytes_per_second)} and {format_bytes(link.read_bytes_per_second)} a second",
        ),
        ("bounds of the step", bounds),
    ]


def action_grid(actions: Sequence[Action]) -> Grid:
    """Shows the actions in the order they are applied, equal treatments of blocks drawn together."""
    rows = [_group_row(same) for same in alike(actions)]
    return Grid(
        title="Actions",
        columns=("action", "where", "frees", "costs", "exactness"),
        rows=tuple(rows) or (("none needed", DASH, DASH, DASH, "bit-exact"),),
        text_columns=(0, 1, 4),
    )


def lever_grid(levers: Sequence[Lever]) -> Grid:
    """Shows what a GiB costs by each way that was weighed, used or not."""
    rows = [
        (
            lever.name,
            f"{lever.num_blocks_used} of {lever.num_blocks} blocks" if lever.num_blocks else "used",
            format_bytes(lever.freed_bytes),
            format_seconds(lever.cost_seconds),
            format_seconds(lever.seconds_per_gib),
        )
        for lever in levers
    ]
    return Grid(
        title="What a GiB costs (without waiting for a link)",
        columns=("way", "used", "frees at most", "costs then", "per GiB"),
        rows=tuple(rows),
        text_columns=(0, 1),
    )


def forecast_phase_grid(forecast: Forecast) -> Grid:
    """Shows predicted peaks by phase in the order in which they come, for the places that the forecast knows.

    Of several the first in which the process is largest is marked.
    """
    phases: dict[str, PeakBytes] = forecast.phases or {"step": forecast.peak}
    known = [field for field in PLACES if any(getattr(peak, field) is not None for peak in phases.values())]
    order = sorted(phases, key=lambda name: (_PHASES.index(name) if name in _PHASES else len(_PHASES), name))
    highest = max(order, key=lambda name: phases[name].process_bytes)
    rows = [
        (
            name.replace("_", " ") + (", measured" if name in forecast.measured_phases else ""),
            *(bytes_or_dash(getattr(phases[name], field)) for field in known),
            *(("◄ peak" if name == highest else "",) if len(phases) > 1 else ()),
        )
        for name in order
    ]
    columns = ("phase", *(PLACES[field] for field in known), *(("",) if len(phases) > 1 else ()))
    return Grid(title="Predicted peaks", columns=columns, rows=tuple(rows), text_columns=(0, len(known) + 1))


def _group_row(actions: Sequence[Action]) -> tuple[str, ...]:
    """Returns one row for actions that differ in their block only."""
    technique = technique_of(actions[0])
    saved = [action.saved_bytes for action in actions if action.saved_bytes is not None]
    costs = [action.cost_seconds for action in actions if action.cost_seconds is not None]
    return (
        technique.what(actions[0]),
        technique.where(actions) or DASH,
        bytes_or_dash(sum(saved) if saved else None),
        seconds_or_dash(sum(costs) if costs else None),
        actions[0].exactness,
    )
