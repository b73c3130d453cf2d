"""A limit on what a plan writes to the disk in a day: plans keep to it, or say what it would have to be."""

from collections.abc import Callable

import pytest
from plans import on_machine

from memwall.errors import InfeasibleError
from memwall.plan.actions import Offload, OptimizerPlacement, ParameterPlacement
from memwall.plan.search import plan
from memwall.trace.records import Trace
from memwall.units import parse_size

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")
DAY_SECONDS = 86_400


@pytest.fixture(scope="module")
def trace(a_trace: Callable[[str], Trace]) -> Trace:
    return on_machine(a_trace("gpt"), disk_read_bytes_per_second=2e10, disk_write_bytes_per_second=2e10)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1, 1e-9])
def test_a_plan_keeps_to_it_by_moving_less(
    share: float, trace: Trace, smallest_bytes: Callable[..., int], plain_bytes: Callable[[Trace], int]
) -> None:
    """GIVEN a disk so fast that moving is cheaper than computing again."""
    budget_bytes = int(0.2 * smallest_bytes(trace) + 0.8 * plain_bytes(trace))
    free = plan(trace, budget=budget_bytes).forecast
    assert free.link is not None
    per_day = int(share * free.link.written_bytes_per_day(free.step_seconds or 1.0))
    found = plan(trace, budget=budget_bytes, disk_writes=per_day).forecast
    assert found.fits
    assert found.moved_bytes_per_step / (found.step_seconds or 1.0) * DAY_SECONDS <= per_day
    assert (found.step_seconds or 0.0) >= (free.step_seconds or 0.0)
    if share == 1e-9:
        assert not any(isinstance(a, Offload | OptimizerPlacement | ParameterPlacement) for a in found.actions)
        assert found.link is None


def test_where_nothing_fits_for_it_the_message_says_what_would_have_to_be_written(
    trace: Trace, smallest_bytes: Callable[..., int]
) -> None:
    budget_bytes = smallest_bytes(trace)
    free = plan(trace, budget=budget_bytes).forecast
    assert free.fits
    with pytest.raises(InfeasibleError, match=r"let .* be written to the disk in a day: --disk-writes SIZE") as error:
        plan(trace, budget=budget_bytes, disk_writes="1MiB")
    asked = next(line for line in error.value.relaxations if "--disk-writes" in line)
    enough = parse_size(asked.removeprefix("let ").partition(" be written")[0].replace(" ", ""))
    assert plan(trace, budget=budget_bytes, disk_writes=int(1.3 * enough)).forecast.fits
    assert error.value.smallest_feasible_bytes > budget_bytes


def test_without_a_limit_nothing_is_different(trace: Trace, smallest_bytes: Callable[..., int]) -> None:
    budget_bytes = int(1.2 * smallest_bytes(trace))
    assert plan(trace, budget=budget_bytes, disk_writes="1000000TiB") == plan(trace, budget=budget_bytes)
