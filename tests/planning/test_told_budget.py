"""The smallest budget that is told where an evaluation does not fit: one that was planned, or none."""

import pytest
from msgspec.structs import replace
from plans import a_plan

from memwall.planning.device_phases import with_smallest_that_holds
from memwall.planning.planfile import Plan


def planned_where(enough_bytes: float, asked: list[int], budget_bytes: int) -> Plan:
    """A plan that fits from so many bytes on, and tells less than that."""
    asked.append(budget_bytes)
    plan = a_plan()
    forecast = replace(
        plan.forecast,
        budget_bytes=budget_bytes,
        fits=budget_bytes >= enough_bytes,
        smallest_feasible_budget_bytes=1000,
    )
    return replace(plan, forecast=forecast)


@pytest.mark.parametrize(("enough_bytes", "most_bytes"), [(1000, 1000), (1050, 1072), (3000, 5000)])
def test_what_is_told_was_planned_and_fits(enough_bytes: int, most_bytes: int) -> None:
    asked: list[int] = []
    told = with_smallest_that_holds(
        planned_where(enough_bytes, [], 500), lambda n: planned_where(enough_bytes, asked, n)
    )
    assert told.forecast.smallest_feasible_budget_bytes == asked[-1]
    assert enough_bytes <= asked[-1] <= most_bytes


def test_where_none_was_found_none_is_told() -> None:
    endless = float("inf")
    told = with_smallest_that_holds(planned_where(endless, [], 500), lambda n: planned_where(endless, [], n))
    assert told.forecast.smallest_feasible_budget_bytes is None
