"""Shows what a step costs at other budgets: one line each, with a bar for its seconds (`memwall plan --curve`)."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from memwall.planning.forecast import BudgetPoint, Forecast
from memwall.report.grid import seconds_or_dash
from memwall.units import format_bytes

_WIDTH = 20


def budget_curve_view(forecast: Forecast) -> Group:
    """Returns the curve of a forecast that has one; budgets under which the smaller one's plan stays are left out."""
    table = Table(
        title="What other budgets cost (simulated)", title_justify="left", box=None, header_style="", show_edge=False
    )
    for heading in ("budget", "peak", "step"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("longer than the plain step by", no_wrap=True)
    table.add_column("actions", overflow="fold")
    plain_seconds = forecast.plain_step_seconds
    most = max((_longer(point, plain_seconds) for point in forecast.curve), default=0.0)
    before: BudgetPoint | None = None
    for point in forecast.curve:
        is_own = point.budget_bytes == forecast.budget_bytes
        if is_own or before is None or _comes_to(point) != _comes_to(before):
            longer = _longer(point, plain_seconds)
            bar = "█" * (round(_WIDTH * longer / most) if most else 0)
            table.add_row(
                Text(("> " if is_own else "") + format_bytes(point.budget_bytes, rounding="up")),
                Text(format_bytes(point.process_bytes)),
                Text(seconds_or_dash(point.step_seconds)),
                Text(f"{100 * longer:5.1f} % {bar}" if plain_seconds else ""),
                Text(", ".join(f"{count} {kind}" for kind, count in point.num_actions.items()) or "none"),
            )
        before = point
    return Group(Text(), table)


def _comes_to(point: BudgetPoint) -> tuple[object, ...]:
    return point.process_bytes, point.step_seconds, point.num_actions


def _longer(point: BudgetPoint, plain_seconds: float | None) -> float:
    """Returns by which share of the plain step a step is longer."""
    return max(0.0, (point.step_seconds or 0.0) / plain_seconds - 1) if plain_seconds else 0.0
