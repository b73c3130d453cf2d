"""Shows the last steps of a run: bytes against budget and forecast, seconds, and what was moved (`memwall top`)."""

import time
from collections.abc import Sequence
from statistics import median

from rich.console import Group
from rich.text import Text

from memwall.report.text import facts
from memwall.session.watch.step_metrics import StepMetrics
from memwall.units import format_bytes, format_seconds

_WIDTH = 30
_BARS = " ▁▂▃▄▅▆▇█"


def steps_view(steps: Sequence[StepMetrics], *, now_seconds: float | None = None) -> Group:
    """Returns what a person sees of the last steps of a run, of which there is one at least.

    Args:
        now_seconds: the present time, in seconds since 1970.
    """
    last = steps[-1]
    age_seconds = max(0.0, (time.time() if now_seconds is None else now_seconds) - last.unix_seconds)
    timed = [one.step_seconds for one in steps if one.step_seconds is not None]
    plan = f"{last.num_actions} actions" if last.is_planned else "recorded, to plan from"
    lines = [
        ("step", f"{last.step}, ended {format_seconds(age_seconds)} ago; {plan}"),
        ("held", _bar(last)),
        ("budget", format_bytes(last.budget_bytes, rounding="down") if last.budget_bytes else "none"),
    ]
    if last.forecast_bytes is not None:
        percent = 100 * (last.forecast_bytes / last.peak_bytes - 1) if last.peak_bytes else 0.0
        lines.append(("foreseen", f"{format_bytes(last.forecast_bytes)}, {percent:+.1f} % of what was held"))
    if last.forecast_by_category:
        parts = (f"{name.replace('_', ' ')} {format_bytes(held)}" for name, held in last.forecast_by_category.items())
        lines.append(("of that", ", ".join(parts)))
    if timed:
        lines.append(("seconds", f"{format_seconds(median(timed))} a step  {_line(timed)}"))
    if last.bytes_to_tier or last.bytes_from_tier:
        rate = ""
        if last.step_seconds:
            rate = f", {format_bytes(int((last.bytes_to_tier + last.bytes_from_tier) / last.step_seconds))}/s"
        moved = f"{format_bytes(last.bytes_to_tier)} out, {format_bytes(last.bytes_from_tier)} back a step{rate}"
        lines.append(("moved", moved))
    if last.num_replans or last.oom_recoveries:
        lines.append(("again", f"{last.num_replans} plans, {last.oom_recoveries} steps after memory ran out"))
    return Group(facts(lines), *_warnings(steps))


def _bar(last: StepMetrics) -> str:
    held = format_bytes(last.peak_bytes, rounding="up")
    if not last.budget_bytes:
        return held
    share = last.peak_bytes / last.budget_bytes
    filled = min(_WIDTH, round(share * _WIDTH))
    return f"{held}  [{'█' * filled}{'░' * (_WIDTH - filled)}] {100 * share:.1f} % of budget"


def _line(values: Sequence[float]) -> str:
    """Returns the last values as a line of bars, between 0 and the largest of them."""
    shown = values[-_WIDTH:]
    most = max(shown)
    return "".join(_BARS[round(value / most * (len(_BARS) - 1))] if most else _BARS[0] for value in shown)


def _warnings(steps: Sequence[StepMetrics]) -> list[Text]:
    passed = [one for one in steps if one.budget_bytes and one.peak_bytes > one.budget_bytes]
    if not passed:
        return []
    worst = max(passed, key=lambda one: one.peak_bytes - one.budget_bytes)
    return [
        Text(
            f"{len(passed)} of the last {len(steps)} steps passed the budget, step {worst.step} by "
            f"{format_bytes(worst.peak_bytes - worst.budget_bytes, rounding='up')}.",
            style="yellow",
        )
    ]
