"""Parameters on disk as the last alternative: where it is offered, what it costs, and that it changes no other plan."""

from collections.abc import Callable

import msgspec
import pytest
from located import parameters_away
from plans import on_machine

from memwall.errors import InfeasibleError
from memwall.planning.candidate import Candidate
from memwall.planning.location import IN_MEMORY, Location
from memwall.planning.one_recording.search_at_location import SearchAtLocation
from memwall.planning.search import make_plan, plan
from memwall.planning.settings import Settings
from memwall.planning.step_under_plan import step_under_actions, step_under_plan
from memwall.planning.techniques import parameters
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement, can_move_parameters, parameter_window_bytes
from memwall.predict import process
from memwall.predict.curve import live_peak_bytes
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step

MIB = 1 << 20
CAPACITY_BYTES = 1 << 40

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


@pytest.fixture
def smallest_without(smallest_where: Callable[..., int]) -> Callable[[Trace], int]:
    """The smallest feasible budget where parameters stay in memory."""
    return lambda trace: smallest_where(trace, parameters.TECHNIQUE, "they stay in this test")


def offered(trace: Trace, capacity_bytes: int = CAPACITY_BYTES) -> tuple[Location, ...] | str:
    return parameters_away(trace, capacity_bytes=capacity_bytes)


def all_placements(trace: Trace) -> list[ParameterPlacement]:
    found = offered(trace)
    assert not isinstance(found, str)
    return [action for location in found for action in location.actions if isinstance(action, ParameterPlacement)]


def built_bytes(trace: Trace) -> int:
    """What the process holds before parameters leave it, which are built in memory."""
    found = offered(trace)
    assert not isinstance(found, str)
    return found[-1].built_bytes


def placed_parameters(trace: Trace) -> ParameterPlacement:
    """The leanest: nothing that can leave stays."""
    return all_placements(trace)[-1]


# Legality.


def test_it_is_legal_on_a_cpu_without_autocast_for_parameters_that_their_own_modules_use(
    a_trace: Callable[[str], Trace],
) -> None:
    trace = a_trace("gpt")
    assert can_move_parameters(trace, MIB, MIB) is None
    elsewhere = msgspec.structs.replace(trace, device="mps")
    assert can_move_parameters(elsewhere, MIB, MIB) == (
        "parameters move from CPU and CUDA memory only; the trace is of device 'mps'"
    )
    lower = msgspec.structs.replace(trace, autocast="bfloat16")
    assert can_move_parameters(lower, MIB, MIB) == (
        "autocast to bfloat16 keeps copies of parameters in memory through a whole forward"
    )
    assert can_move_parameters(trace, 0, MIB) == (
        "no parameter is large enough to move, and used by its own module alone"
    )
    assert can_move_parameters(trace, 2 * MIB, MIB) == (
        "parameters, gradients and optimizer state need 2.0 MiB of disk, there are 1.0 MiB"
    )
    assert offered(lower) == can_move_parameters(lower, 1, 1)
    assert str(offered(trace, MIB)).endswith("of disk, there are 1.0 MiB")


# What is offered.


def test_it_frees_parameters_and_gradients_and_writes_both_once(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    steady, placement = steady_step(trace), placed_parameters(trace)
    parameters = sum(s.nbytes for s in steady.storages if s.category == "parameter")
    assert 1.9 * parameters < (placement.saved_bytes or 0) < 2.01 * parameters
    assert placement.written_bytes == placement.saved_bytes
    assert placement.window_bytes == parameter_window_bytes(parameters)
    twice = msgspec.structs.replace(trace, num_micro_batches=2)
    assert placed_parameters(twice).written_bytes == 3 * (placement.saved_bytes or 0) // 2
    assert built_bytes(trace) > trace.base_bytes + parameters


@pytest.mark.parametrize(("num_bytes", "window_bytes"), [(0, MIB), (320 * MIB, 10 * MIB), (1 << 40, 32 * MIB)])
def test_the_window_is_a_small_part_of_the_parameters(num_bytes: int, window_bytes: int) -> None:
    assert parameter_window_bytes(num_bytes) == window_bytes


def test_it_costs_the_disks_time_less_what_forward_and_backward_compute_meanwhile(
    a_trace: Callable[[str], Trace],
) -> None:
    trace = a_trace("gpt")
    half_bytes = (placed_parameters(trace).saved_bytes or 0) / 2
    slow = on_machine(trace, read_bytes_per_second=2e7, write_bytes_per_second=1e7)
    computing = sum(op.seconds for op in steady_step(trace).ops if op.phase in ("forward", "backward"))
    # Read in forward, backward and step, written as gradients and as parameters; gradients are read in the step.
    disk_seconds = 4 * half_bytes / 2e7 + 2 * half_bytes / 1e7
    copying_seconds = half_bytes * trace.machine.copy_seconds_per_byte
    expected = disk_seconds - computing + copying_seconds
    assert placed_parameters(slow).cost_seconds == pytest.approx(expected, rel=0.01)


def test_of_a_disk_that_takes_no_time_copies_pages_and_the_threads_own_work_are_left(
    a_trace: Callable[[str], Trace],
) -> None:
    trace = on_machine(a_trace("gpt"), read_bytes_per_second=1e15, write_bytes_per_second=1e15)
    half_bytes = (placed_parameters(trace).saved_bytes or 0) / 2
    seconds = placed_parameters(on_machine(trace, copy_seconds_per_byte=0.0)).cost_seconds or 0.0
    assert 0.1e-9 < seconds / (3 * half_bytes) < 1e-9
    copied = placed_parameters(on_machine(trace, copy_seconds_per_byte=2e-9)).cost_seconds
    with_copies = on_machine(trace, copy_seconds_per_byte=2e-9, fault_seconds_per_byte=1e-9)
    assert copied == pytest.approx(seconds + half_bytes * 2e-9)
    # Two reads of parameters before the step, parameters and gradients in it.
    assert placed_parameters(with_copies).cost_seconds == pytest.approx((copied or 0.0) + 4 * half_bytes * 1e-9)
    on_two_cores = placed_parameters(msgspec.structs.replace(with_copies, num_threads=2)).cost_seconds
    assert on_two_cores == pytest.approx(seconds / 2 + half_bytes * 2e-9 + 2 * half_bytes * 1e-9)


def test_parameters_may_stay_where_their_gradients_leave_more_of_them_for_more_memory_and_less_time(
    a_trace: Callable[[str], Trace],
) -> None:
    trace = on_machine(a_trace("gpt"), read_bytes_per_second=2e8, write_bytes_per_second=1e8)
    step, found = steady_step(trace), all_placements(trace)
    assert len(found) > 2
    units = {trace.modules[unit].path for unit in range(len(trace.modules))}
    assert units >= set(found[0].staying) > set(found[1].staying) > set(found[-1].staying) == set()
    seconds = [placement.cost_seconds or 0.0 for placement in found]
    assert seconds == sorted(seconds)
    assert seconds[0] < 0.75 * seconds[-1]
    # Of the first only gradients leave: half of what the last one frees.
    assert found[0].saved_bytes == (found[-1].saved_bytes or 0) // 2
    assert found[0].written_bytes == found[0].saved_bytes
    peaks = [live_peak_bytes(step_under_actions(trace, step, (each,)), "cpu") for each in found]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < live_peak_bytes(step, "cpu")


# In the search.


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_a_budget_that_nothing_else_meets_is_met_with_parameters_on_disk(
    name: str,
    a_trace: Callable[[str], Trace],
    smallest_without: Callable[[Trace], int],
    smallest_bytes: Callable[..., int],
) -> None:
    trace = a_trace(name)
    least, least_without = smallest_bytes(trace), smallest_without(trace)
    assert least < least_without
    budget_bytes = (least + least_without) // 2
    found = plan(trace, budget=budget_bytes)
    parameters, state = (a for a in found.actions if isinstance(a, OptimizerPlacement | ParameterPlacement))
    # In the order in which they are applied.
    assert isinstance(parameters, ParameterPlacement)
    assert isinstance(state, OptimizerPlacement)
    assert state.resident_bytes == 0
    assert not any(isinstance(action, Offload) for action in found.actions)
    forecast = found.forecast
    assert forecast.fits
    assert forecast.peak.process_bytes + forecast.margin_bytes <= budget_bytes
    assert forecast.smallest_feasible_budget_bytes == least
    assert forecast.phases["steady_step"].allocated_bytes == live_peak_bytes(step_under_plan(trace, found), "cpu")
    assert forecast.phases["build"].process_bytes == built_bytes(trace)
    away_bytes = (parameters.saved_bytes or 0) + (state.saved_bytes or 0)
    assert forecast.phases["steady_step"].disk_bytes == away_bytes
    assert forecast.moved_bytes_per_step == parameters.written_bytes + (state.saved_bytes or 0)
    assert forecast.step_seconds is not None
    assert forecast.plain_step_seconds is not None
    assert forecast.step_seconds >= forecast.plain_step_seconds + (parameters.cost_seconds or 0.0)
    assert any("of parameters and gradients are on disk between their uses" in line for line in forecast.binding)
    assert any("are written to the disk in a day of such steps" in line for line in forecast.binding)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_a_budget_that_something_else_meets_is_met_without(
    name: str, a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int]
) -> None:
    # Not even where it would cost nothing.
    trace = on_machine(a_trace(name), read_bytes_per_second=1e15, write_bytes_per_second=1e15)
    found = plan(trace, budget=smallest_without(trace) + MIB)
    assert not any(isinstance(action, ParameterPlacement) for action in found.actions)


@pytest.mark.slow
def test_more_parameters_stay_under_a_larger_budget_and_the_step_is_shorter(
    a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int], smallest_bytes: Callable[..., int]
) -> None:
    trace = on_machine(a_trace("gpt"), read_bytes_per_second=2e8, write_bytes_per_second=1e8)
    least, least_without = smallest_bytes(trace), smallest_without(trace)
    found = [plan(trace, budget=least + share * (least_without - least) // 10) for share in (0, 5, 9)]
    away = [next(a for a in each.actions if isinstance(a, ParameterPlacement)) for each in found]
    num_staying = [len(action.staying) for action in away]
    assert num_staying[0] < num_staying[-1]
    assert num_staying == sorted(num_staying)
    seconds = [each.forecast.step_seconds or 0.0 for each in found]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] < seconds[0]


@pytest.mark.slow
@pytest.mark.parametrize("has_heap", [False, True], ids=["tensors alone", "in a heap that keeps pages"])
def test_what_a_budget_leaves_beside_parameters_on_disk_is_used_for_state(
    has_heap: bool,
    a_trace: Callable[[str], Trace],
    smallest_bytes: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN nothing but parameters on disk WHEN the budget grows THEN ever more state stays, and steps are shorter."""
    trace = on_machine(a_trace("gpt"), read_bytes_per_second=2e8, write_bytes_per_second=1e8)
    if has_heap:
        monkeypatch.setattr(process, "heap_unavailable_reason", heap_unavailable_reason)
        if heap_unavailable_reason():
            pytest.skip(str(heap_unavailable_reason()))
    least = smallest_bytes(trace)
    best = SearchAtLocation.best

    def with_parameters_away(search: SearchAtLocation, limit_bytes: int) -> Candidate | None:
        return None if not search._location.keeps_tier_busy else best(search, limit_bytes)

    monkeypatch.setattr(SearchAtLocation, "best", with_parameters_away)
    budgets = [least + room * MIB for room in (0, 120, 160, 200)]
    found = [plan(trace, budget=budget_bytes) for budget_bytes in budgets]
    states = [next(a for a in each.actions if isinstance(a, OptimizerPlacement)) for each in found]
    assert states[0].resident_bytes == 0
    resident = [state.resident_bytes for state in states]
    assert resident == sorted(resident)
    assert 0 < resident[1] < resident[-1]
    seconds = [each.forecast.step_seconds or 0.0 for each in found]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.slow
def test_no_budget_is_met_that_the_model_does_not_fit_into_when_it_is_built(
    a_trace: Callable[[str], Trace], smallest_bytes: Callable[..., int]
) -> None:
    trace = a_trace("gpt")
    assert smallest_bytes(trace) >= built_bytes(trace)


@pytest.mark.slow
def test_what_keeps_parameters_in_memory_is_in_the_message(
    a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int], smallest_bytes: Callable[..., int]
) -> None:
    trace = a_trace("gpt")
    budget_bytes = (smallest_bytes(trace) + smallest_without(trace)) // 2
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=budget_bytes, parameters_stay="blocks.0.up has a hook"))
    assert error.value.smallest_feasible_bytes == smallest_without(trace)
    assert "\nparameters and gradients stay in memory: blocks.0.up has a hook\n" in str(error.value)
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=budget_bytes // 2))
    assert "stay in memory" not in str(error.value)


def test_parameters_go_only_where_state_goes_and_the_message_says_why_that_stays(
    a_trace: Callable[[str], Trace],
) -> None:
    trace = msgspec.structs.replace(a_trace("gpt"), optimizer="LBFGS")
    reason = "they go to disk only where the optimizer's state goes as well, and LBFGS is not known to step each "
    assert offered(trace) == f"{reason}parameter alone"
    with pytest.raises(InfeasibleError, match=f"parameters and gradients stay in memory: {reason}"):
        make_plan(trace, Settings(budget_bytes=1))
    without_disk = on_machine(a_trace("gpt"), tiers=())
    with pytest.raises(InfeasibleError) as error:
        make_plan(without_disk, Settings(budget_bytes=1))
    assert "stay in memory" not in str(error.value)  # the way out is a disk, which it names


def test_in_memory_nothing_changes(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    step = steady_step(trace)
    assert step_under_actions(trace, step, IN_MEMORY.actions) is step
    assert (IN_MEMORY.actions, IN_MEMORY.seconds, IN_MEMORY.away_bytes, IN_MEMORY.written_bytes) == ((), 0, 0, 0)
