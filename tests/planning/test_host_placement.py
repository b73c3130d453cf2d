"""Optimizer state of a device in host memory, as a plan has it: what that frees, where it is counted, what it costs."""

import msgspec
import pytest
import torch
from fake_steps import record_fake
from located import state_placements
from plans import on_machine
from torch import nn

from memwall.machine.hardware import Hardware
from memwall.planning.device_phases import with_device_phases
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.step_under_plan import step_under_actions
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES, OptimizerPlacement
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.curve import live_curve, live_peak_bytes
from memwall.predict.device import DeviceModel
from memwall.predict.state_on_disk import NUM_BUFFERS, buffer_sizes, movable_state_bytes, state_sizes
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.workload import Workload
from memwall.units import format_bytes

WIDTH, NUM_LAYERS = 1024, 24
HOST_BYTES = 64 << 30
STATE_BYTES = 2 * 4 * NUM_LAYERS * WIDTH * WIDTH
"""Of matrices: biases are too small to move."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trace(hardware: Hardware) -> Trace:
    """A few rows through many matrices, stepped one by one: state is most of what the device holds."""
    workload = Workload(
        model=lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS))),
        batch=lambda: torch.ones(8, WIDTH),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )
    recording = recording_for(hardware)
    fake = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(fake, hardware, host_bytes=HOST_BYTES)


@pytest.fixture(scope="module")
def tight(trace: Trace, hardware: Hardware) -> Plan:
    """A plan that only state in host memory makes possible."""
    without = on_machine(trace, free_bytes=1)
    settings = Settings(budget_bytes=hardware.usable_bytes, hardware=hardware)
    least = make_plan(without, settings).forecast.smallest_feasible_budget_bytes
    assert least is not None
    return make_plan(trace, msgspec.structs.replace(settings, budget_bytes=least - STATE_BYTES // 2))


def placement_of(plan: Plan) -> OptimizerPlacement:
    (found,) = (action for action in plan.actions if isinstance(action, OptimizerPlacement))
    return found


@pytest.mark.slow
def test_a_budget_that_nothing_else_meets_is_met_with_state_in_host_memory(tight: Plan) -> None:
    action = placement_of(tight)
    assert (action.tier, action.exactness) == ("host", "bit-exact")
    assert tight.forecast.fits
    assert tight.forecast.moved_bytes_per_step == action.saved_bytes
    assert any("are read from host memory and written in each step" in line for line in tight.forecast.binding)


def test_state_leaves_the_device_and_its_buffers_are_there_while_the_optimizer_runs(trace: Trace) -> None:
    step = steady_step(trace)
    whole = state_placements(trace, step, capacity_bytes=HOST_BYTES)[0]
    assert whole.saved_bytes == movable_state_bytes(step, MIN_STATE_BYTES) == STATE_BYTES
    under = step_under_actions(trace, step, (whole,))
    buffers = buffer_sizes(state_sizes(step, MIN_STATE_BYTES), whole.bucket_bytes)
    assert len(buffers) == NUM_BUFFERS
    first = next(number for number, op in enumerate(step.ops) if op.phase == "optimizer")
    before, after = (live_curve(one.storages, len(one.ops), device="cuda") for one in (step, under))
    assert before[first - 1] - after[first - 1] == STATE_BYTES
    assert STATE_BYTES - sum(buffers) - (1 << 20) < before[first] - after[first] < STATE_BYTES - sum(buffers)
    assert live_peak_bytes(under, "cuda") < live_peak_bytes(step, "cuda") - STATE_BYTES // 2


def test_the_host_holds_it_from_the_first_step_on_and_once_more_while_it_is_saved_or_loaded(
    tight: Plan, trace: Trace, hardware: Hardware
) -> None:
    state_bytes = placement_of(tight).saved_bytes or 0
    ample = make_plan(trace, Settings(budget_bytes=hardware.usable_bytes, hardware=hardware))
    assert not any(isinstance(action, OptimizerPlacement) for action in ample.actions)
    more = {
        name: (phase.host_bytes or 0) - (ample.forecast.phases[name].host_bytes or 0)
        for name, phase in tight.forecast.phases.items()
    }
    assert more["build"] == 0
    assert more["first_step"] == more["steady_step"] == more["resume"] == state_bytes
    assert more["save"] == 2 * state_bytes
    assert tight.forecast.peak.host_bytes == max(phase.host_bytes or 0 for phase in tight.forecast.phases.values())


def test_a_resumption_has_all_of_it_on_the_device_and_a_checkpoint_all_of_it_on_disk(
    tight: Plan, trace: Trace, hardware: Hardware
) -> None:
    ample = make_plan(trace, Settings(budget_bytes=hardware.usable_bytes, hardware=hardware))
    resumed = (plan.forecast.phases["resume"].allocated_bytes for plan in (tight, ample))
    assert len(set(resumed)) == 1
    saved = (plan.forecast.phases["save"].disk_bytes for plan in (tight, ample))
    assert len(set(saved)) == 1


def test_a_budget_that_a_resumption_does_not_keep_to_is_named(tight: Plan, trace: Trace, hardware: Hardware) -> None:
    resume_bytes = tight.forecast.phases["resume"].process_bytes

    def reasons(budget_bytes: int) -> str:
        asked = msgspec.structs.replace(tight.forecast, budget_bytes=budget_bytes)
        plan = msgspec.structs.replace(tight, forecast=asked)
        return " ".join(with_device_phases(plan, trace, DeviceModel(trace, hardware)).forecast.binding)

    assert "to resume" not in reasons(resume_bytes)
    assert "all of the optimizer's state on the device for a while" in reasons(resume_bytes - 1)
    assert f"{format_bytes(resume_bytes)} to resume, beyond the budget" in reasons(resume_bytes - 1)


def test_it_costs_the_links_time_both_ways_less_what_the_optimizer_computes_meanwhile(trace: Trace) -> None:
    step = steady_step(trace)
    computing_seconds = sum(op.seconds for op in step.ops if op.phase == "optimizer")

    def seconds(speed: float) -> float:
        link = on_machine(trace, read_bytes_per_second=speed, write_bytes_per_second=speed)
        return state_placements(link, step, capacity_bytes=HOST_BYTES)[0].cost_seconds or 0.0

    assert seconds(1e9) == pytest.approx(2 * STATE_BYTES / 1e9 - computing_seconds)
    # No thread of the host works for it.
    assert seconds(1e18) == pytest.approx(0.0, abs=1e-9)


def test_without_room_in_host_memory_it_is_not_offered(trace: Trace) -> None:
    assert state_placements(trace, steady_step(trace), capacity_bytes=STATE_BYTES - 1) == ()
