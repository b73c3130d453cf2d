"""Says in one line what a plan does, as runs tell it that have no page to show it on."""

from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.technique import technique_of
from memwall.units import format_bytes

__all__ = ["actions_text", "plan_line", "writes_text"]

_SECONDS_PER_DAY = 86_400


def plan_line(plan: Plan) -> str:
    """Returns what a plan does, what it foresees, and what it writes to the disk in a day."""
    forecast = plan.forecast
    budget = "" if not forecast.budget_bytes else f" for {format_bytes(forecast.budget_bytes, rounding='down')}"
    foreseen = f"foresees {format_bytes(forecast.peak.process_bytes, rounding='up')}"
    if plan.actions and forecast.plain_peak is not None:
        foreseen += f" (without it {format_bytes(forecast.plain_peak.process_bytes, rounding='up')})"
    if forecast.step_seconds and forecast.plain_step_seconds and plan.actions:
        foreseen += f", steps {forecast.step_seconds / forecast.plain_step_seconds:.2f} times as long"
    writes = writes_text(plan)
    return f"the plan{budget}: {actions_text(plan.actions)}; {foreseen}{f'; {writes}' if writes else ''}"


def actions_text(actions: tuple[Action, ...]) -> str:
    """Returns what actions do and where, equal ones together: "recompute at layers.0-11; offload at head"."""
    groups: dict[tuple[object, ...], list[Action]] = {}
    for action in actions:
        groups.setdefault((type(action), *technique_of(action).row_key(action)), []).append(action)
    texts = []
    for same in groups.values():
        technique = technique_of(same[0])
        where = technique.where(same)
        texts.append(technique.what(same[0]) + (f" ({where})" if where else ""))
    return ", ".join(texts) or "nothing needs to be done"


def writes_text(plan: Plan) -> str:
    """Returns what a plan writes to the disk in a day, and how to have it write less; "" where it writes nothing."""
    forecast = plan.forecast
    if forecast.link is None or forecast.link.tier != "disk" or not forecast.step_seconds:
        return ""
    per_day = forecast.link.written_bytes / forecast.step_seconds * _SECONDS_PER_DAY
    return f"{format_bytes(per_day, rounding='up')} a day are written to the disk (--disk-writes limits that)"
