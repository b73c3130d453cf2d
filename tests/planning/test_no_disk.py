"""Plans write nothing to the disk where none may, or where computing again costs little more."""

from collections.abc import Callable

import pytest
from combinations import every_value
from plans import on_machine

from memwall.errors import InfeasibleError
from memwall.planning import search
from memwall.planning.search import plan
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.trace.records import Trace

pytestmark = [pytest.mark.usefixtures("one_thread", "without_malloc"), pytest.mark.slow]


@pytest.fixture(scope="module")
def trace(a_trace: Callable[[str], Trace]) -> Trace:
    return on_machine(a_trace("gpt"), read_bytes_per_second=2e10, write_bytes_per_second=2e10)


def test_without_the_disk_a_plan_moves_nothing(
    trace: Trace, smallest_bytes: Callable[..., int], plain_bytes: Callable[[Trace], int]
) -> None:
    """GIVEN a disk so fast that moving is cheaper than computing again."""
    budget_bytes = int(0.2 * smallest_bytes(trace) + 0.8 * plain_bytes(trace))
    free = plan(trace, budget=budget_bytes).forecast
    assert free.link is not None
    found = plan(trace, budget=budget_bytes, no_disk=True).forecast
    assert found.fits
    assert (found.step_seconds or 0.0) >= (free.step_seconds or 0.0)
    assert not any(isinstance(a, Offload | OptimizerPlacement | ParameterPlacement) for a in found.actions)
    assert found.link is None


def test_where_nothing_fits_without_it_the_message_says_so(trace: Trace, smallest_bytes: Callable[..., int]) -> None:
    budget_bytes = smallest_bytes(trace)
    assert plan(trace, budget=budget_bytes).forecast.fits
    with pytest.raises(InfeasibleError, match=r"let the disk be written to: leave out --no-disk") as error:
        plan(trace, budget=budget_bytes, no_disk=True)
    assert error.value.smallest_feasible_bytes > budget_bytes


@pytest.mark.parametrize(("name", "speed"), every_value(["gpt", "vit"], [2e10, 3e9, 3e8]))
def test_a_forecast_lies_between_the_bounds_that_it_states(
    name: str,
    speed: float,
    a_trace: Callable[[str], Trace],
    smallest_bytes: Callable[..., int],
    plain_bytes: Callable[[Trace], int],
) -> None:
    trace = on_machine(
        a_trace(name),
        read_bytes_per_second=speed,
        write_bytes_per_second=speed,
        copy_seconds_per_byte=3e-10,
        fault_seconds_per_byte=3e-10,
    )
    for share in (0.0, 0.3, 0.7):
        budget_bytes = int((1 - share) * smallest_bytes(trace) + share * plain_bytes(trace))
        forecast = plan(trace, budget=budget_bytes).forecast
        link, seconds = forecast.link, forecast.step_seconds or 0.0
        if link is None:
            continue
        assert link.written_bytes == forecast.moved_bytes_per_step
        assert 0 < link.compute_seconds <= 1.001 * seconds
        assert 0.999 * link.ideal_seconds <= seconds <= 1.001 * link.serial_seconds


@pytest.mark.parametrize(("speed", "writes"), [(2e10, True), (1e9, False)])
def test_the_disk_is_used_where_computing_again_costs_clearly_more(
    speed: float,
    writes: bool,
    a_trace: Callable[[str], Trace],
    smallest_bytes: Callable[..., int],
    plain_bytes: Callable[[Trace], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN seconds of operations that follow from their FLOPs, and disks on which moving costs less in either case."""
    trace = on_machine(a_trace("gpt"), read_bytes_per_second=speed, write_bytes_per_second=speed)
    budget_bytes = int(0.2 * smallest_bytes(trace) + 0.8 * plain_bytes(trace))
    found = plan(trace, budget=budget_bytes).forecast
    none = plan(trace, budget=budget_bytes, no_disk=True).forecast
    assert none.link is None
    assert none.fits
    assert (found.link is not None) == writes
    added = (found.step_seconds or 0.0) - (found.plain_step_seconds or 0.0)
    added_without = (none.step_seconds or 0.0) - (none.plain_step_seconds or 0.0)
    assert (added_without > 1.25 * added) == writes
    monkeypatch.setattr(search, "_WORTH_WRITING", 1.0)
    cheapest = plan(trace, budget=budget_bytes).forecast
    assert cheapest.link is not None
    assert (cheapest.step_seconds or 0.0) < (none.step_seconds or 0.0)
