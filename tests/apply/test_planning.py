"""Plans of a running session: planning takes memory itself, which a refusal counts as a plan does."""

import msgspec
import pytest
import torch
from torch import nn

import memwall
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.errors import InfeasibleError
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.one_recording.search_at_location import SearchAtLocation
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.predict.first_step import FirstStep
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.predict.process import ProcessModel, calibrated
from memwall.session import first_plan as planning
from memwall.trace.records import COMPILED_CODE, Trace
from memwall.trace.trace_builder import TraceBuilder, record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.slow

MIB = 1 << 20


@pytest.fixture(scope="module")
def trace() -> Trace:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    model(torch.ones(512, 256)).sum().backward()
    optimizer.step()
    builder.finish_step(optimizer)
    return msgspec.structs.replace(builder.trace(optimizer), base_bytes=100 * MIB)


def refused(trace: Trace, first: FirstStep | None = None) -> int:
    """The smallest budget that a session's refusal names."""
    with pytest.raises(InfeasibleError) as error:
        planning.planned(trace, Settings(budget_bytes=MIB, first_step=first), AllocatorHandler())
    return error.value.smallest_feasible_bytes


def named(trace: Trace) -> int:
    """The same, as far as it follows from the trace alone."""
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=MIB))
    return error.value.smallest_feasible_bytes


def test_a_refusal_counts_what_planning_left_in_the_process(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a solver that takes 20 MiB when it is first loaded THEN the next run has them too."""
    held = iter([200 * MIB, 220 * MIB])
    monkeypatch.setattr(planning, "process_bytes", lambda: next(held))
    assert refused(trace) == named(trace) + 20 * MIB


def test_a_refusal_counts_what_planning_held_at_most(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "process_peak_bytes", lambda: 700 * MIB)
    first = FirstStep(needed_bytes=150 * MIB, in_memory_bytes=0, stays_from_bytes=0)
    assert refused(trace, first) >= 700 * MIB


def test_a_refusal_counts_what_planning_for_the_told_budget_holds(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a search that holds more where something fits THEN the run under the told budget has room for it."""
    peaks = iter([700 * MIB, 790 * MIB])
    monkeypatch.setattr(planning, "process_bytes", lambda: 200 * MIB)  # the tests before this one may have left more
    monkeypatch.setattr(planning, "process_peak_bytes", lambda: next(peaks))
    first = FirstStep(needed_bytes=150 * MIB, in_memory_bytes=0, stays_from_bytes=0)
    assert refused(trace, first) >= 790 * MIB


def test_a_refusal_works_out_what_is_the_same_for_every_budget_once(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a refusal THEN the least that a step takes is worked out three times in each location: to look for a plan;
    with what planning took, for the number and the message; and as the run under it does, whose memory that shows."""
    first = FirstStep(needed_bytes=150 * MIB, in_memory_bytes=0, stays_from_bytes=0)
    searched: list[str] = []
    smallest = SearchAtLocation.smallest_bytes

    def counted(search: SearchAtLocation) -> int:
        searched.append(repr(search._location))
        return smallest(search)

    monkeypatch.setattr(SearchAtLocation, "smallest_bytes", counted)
    monkeypatch.setattr(planning, "_NOTED_BYTES", -1)
    monkeypatch.setattr(planning, "process_bytes", lambda: 200 * MIB)
    monkeypatch.setattr(planning, "process_peak_bytes", lambda: 210 * MIB)
    told_bytes = refused(trace, first)
    assert len(searched) == 3 * len(set(searched)) > 0
    held = msgspec.structs.replace(first, needed_bytes=210 * MIB)
    assert told_bytes == RecordingSearch(trace, Settings(budget_bytes=MIB, first_step=held)).smallest_bytes()


def test_planning_that_passes_the_budget_is_refused_though_its_plan_would_fit(
    trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a step of so many operations that planning takes more than the step THEN no run trains for nothing."""
    monkeypatch.setattr(planning, "process_peak_bytes", lambda: 2100 * MIB)
    first = FirstStep(needed_bytes=150 * MIB, in_memory_bytes=0, stays_from_bytes=0)
    settings = Settings(budget_bytes=2000 * MIB, first_step=first)
    assert make_plan(trace, settings).forecast.fits
    with pytest.raises(InfeasibleError) as error:
        planning.planned(trace, settings, AllocatorHandler())
    assert error.value.smallest_feasible_bytes >= 2100 * MIB
    planning.planned(trace, settings, AllocatorHandler(), is_first=False)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_first_step_that_passed_the_budget_is_refused_though_later_ones_would_fit(
    is_compiled: bool, trace: Trace
) -> None:
    """GIVEN a budget for which there is a plan, but not for the step before it THEN one is told that both keep to, but
    of a compiled model, which saves less later, that is judged when the run has ended.
    """
    if is_compiled:
        trace = msgspec.structs.replace(trace, names=(*trace.names, COMPILED_CODE))
    first = FirstStep(needed_bytes=2100 * MIB, in_memory_bytes=0, stays_from_bytes=0)
    settings = Settings(budget_bytes=2000 * MIB, first_step=first)
    assert make_plan(trace, settings).forecast.fits
    if is_compiled:
        assert planning.planned(trace, settings, AllocatorHandler())[1].forecast.passed_phases == ()
        return
    with pytest.raises(InfeasibleError) as error:
        planning.planned(trace, settings, AllocatorHandler())
    assert error.value.smallest_feasible_bytes >= 2100 * MIB


def test_an_evaluation_that_does_not_fit_is_refused_with_the_ways_out() -> None:
    """GIVEN a step that has a plan WHEN an evaluation is to pass the budget THEN it is named."""
    workload = Workload(
        model=lambda: nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)),
        batch=lambda: torch.ones(512, 256),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = record(workload, num_steps=1)
    first = FirstStep(
        needed_bytes=150 * MIB,
        in_memory_bytes=0,
        stays_from_bytes=0,
        evaluation_batch=1 << 20,
    )
    with pytest.raises(InfeasibleError) as error:
        planning.planned(trace, Settings(budget_bytes=2000 * MIB, first_step=first), AllocatorHandler())
    assert ("an evaluation of 1048576 samples at once, more than the 512 of a step, is foreseen to hold ") in str(
        error.value
    )
    assert (
        "GiB, which is in that, and no plan makes it smaller: evaluate fewer at once; a data loader with such batches, "
        "which evaluates nothing in this run, is built after the second step"
    ) in str(error.value)
    told_bytes = error.value.smallest_feasible_bytes
    assert told_bytes > 3000 * MIB
    planning.planned(trace, Settings(budget_bytes=told_bytes, first_step=first), AllocatorHandler())


def workspace_of(trace: Trace, peak_bytes: int, **known: int) -> int:
    """Returns the workspace that plans are made with, of a parked step that held so much at its peak."""
    first = msgspec.structs.replace(trace.steps[0], process_peak_bytes=peak_bytes)
    parked = msgspec.structs.replace(trace, is_parked=True, steps=(first,))
    return calibrated(parked, base_bytes=100 * MIB, window_bytes=32 * MIB, min_bytes=64 << 10, **known).workspace_bytes


@pytest.mark.parametrize("kept_bytes", [0, 5 * MIB])
def test_free_pages_that_a_large_budget_had_room_for_are_no_workspace(trace: Trace, kept_bytes: int) -> None:
    """GIVEN the same step under two budgets, one with room for free pages THEN plans know the same of both."""
    found = workspace_of(trace, 200 * MIB + kept_bytes, kept_bytes=kept_bytes)
    assert found == workspace_of(trace, 200 * MIB, kept_bytes=0) > 0


def test_what_was_on_disk_of_the_steps_tensors_hides_no_workspace(trace: Trace) -> None:
    """GIVEN a teacher on disk, which the records have in memory THEN the peak is as much higher than they say."""
    found = workspace_of(trace, 200 * MIB - 20 * MIB, absent_bytes=20 * MIB)
    assert found == workspace_of(trace, 200 * MIB, absent_bytes=0) > 0


def test_workspace_is_what_was_seen_outside_the_heap(trace: Trace) -> None:
    """GIVEN a peak with tensors that were read ahead WHEN what lies outside the heap was seen THEN they are none."""
    first = msgspec.structs.replace(trace.steps[0], process_peak_bytes=300 * MIB)
    parked = msgspec.structs.replace(trace, is_parked=True, steps=(first,))
    found = calibrated(parked, base_bytes=100 * MIB, window_bytes=32 * MIB, min_bytes=64 << 10, outside_bytes=37 * MIB)
    assert 4 * MIB < found.workspace_bytes <= 5 * MIB  # less what small tensors hold, which the forecast adds


@pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())
def test_malloc_loses_as_much_as_small_tensors_hold_unless_more_was_measured() -> None:
    """GIVEN 200 results of 32 KiB, which malloc holds."""
    workload = Workload(
        model=lambda: nn.Sequential(nn.Linear(64, 64), *(nn.Tanh() for _ in range(200))),
        batch=lambda: torch.zeros(128, 64),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace = record(workload, num_steps=1)

    def forecast_bytes(workspace_bytes: int) -> int:
        process = ProcessModel(msgspec.structs.replace(trace, workspace_bytes=workspace_bytes))
        return process.treated(trace.steps[0], 64 << 30).process_bytes

    lost_bytes = forecast_bytes(0) - (forecast_bytes(1 << 30) - (1 << 30))
    assert 200 * (32 << 10) <= lost_bytes < 203 * (32 << 10)
    assert forecast_bytes(lost_bytes) == forecast_bytes(0)


@pytest.mark.skipif(bool(heap_unavailable_reason()), reason=heap_unavailable_reason())
def test_the_recorded_step_leaves_the_heap_less_as_the_process_grows_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a step before any plan THEN the limit is looked at in forward and backward, and never after its end."""
    seen: list[str] = []
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(AllocatorHandler, "hold_limit", lambda _: seen.append("held"))
    with memwall.fit(model, optimizer, budget="20GiB") as session:
        seen.clear()
        loss = model(torch.ones(4, 64)).square().sum()
        in_forward = len(seen)
        loss.backward()
        in_backward = len(seen) - in_forward
        optimizer.step()
        optimizer.zero_grad()
        session.end_step()
        seen.clear()
        model[1](torch.ones(1, 64)).square().sum().backward()
    assert in_forward >= 3  # an input, a weight, a result
    assert in_backward >= 3
    assert seen == []
