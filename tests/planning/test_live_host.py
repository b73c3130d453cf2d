"""A run on a CUDA device that plans for itself: what its measured link to host memory, and its CPU, are good for."""

import msgspec
import pytest
import torch
from fake_steps import record_fake
from plans import on_machine
from torch import nn

from memwall.errors import InfeasibleError
from memwall.machine.hardware import Hardware
from memwall.machine.tiers import Machine, Tier
from memwall.planning.action import Action
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.predict.cuda.translate import recording_for, translated
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

WIDTH, NUM_LAYERS = 1024, 12
STATE_BYTES = 2 * 4 * NUM_LAYERS * WIDTH * WIDTH
HOOKED = "a hook runs when its gradient is accumulated"
LINK = Machine(
    tiers=(Tier(name="host", write_bytes_per_second=2.4e10, read_bytes_per_second=2.1e10, free_bytes=64 << 30),)
)
"""As a session measures it; of no machine in particular."""

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


def live(hardware: Hardware, num_rows: int) -> Trace:
    """A step as a session on the device records it: with the process it is in, and the speeds of this machine."""
    workload = Workload(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))),
        batch=lambda: torch.ones(num_rows, WIDTH),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    )
    recording = recording_for(hardware)
    fake = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return msgspec.structs.replace(translated(fake, hardware), source="recorded", base_bytes=1 << 29, machine=LINK)


@pytest.fixture(scope="module")
def of_state(hardware: Hardware) -> Trace:
    """State is most of what the device holds."""
    return live(hardware, num_rows=8)


@pytest.fixture(scope="module")
def of_activations(hardware: Hardware) -> Trace:
    """Saved tensors are most of what the device holds."""
    return live(hardware, num_rows=16384)


def smallest_bytes(trace: Trace, parameters_stay: str = "") -> int:
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=1, parameters_stay=parameters_stay))
    return error.value.smallest_feasible_bytes


def at_the_smallest(trace: Trace, *allow: str, parameters_stay: str = "") -> Plan:
    budget_bytes = smallest_bytes(trace, parameters_stay)
    return make_plan(trace, Settings(budget_bytes=budget_bytes, allow=allow, parameters_stay=parameters_stay))


def of_kind(plan: Plan, kind: type[Action]) -> list[Action]:
    return [action for action in plan.actions if isinstance(action, kind)]


def test_optimizer_state_moves_to_host_memory(of_state: Trace) -> None:
    without = on_machine(of_state, tiers=())
    assert smallest_bytes(of_state, HOOKED) < smallest_bytes(without) - STATE_BYTES // 2
    plan = at_the_smallest(of_state, parameters_stay=HOOKED)
    (state,) = of_kind(plan, OptimizerPlacement)
    assert isinstance(state, OptimizerPlacement)
    assert state.tier == "host"
    assert not of_kind(plan, ParameterPlacement)
    assert plan.forecast.phases["steady_step"].host_bytes == state.saved_bytes
    assert any("are read from host memory and written in each step" in line for line in plan.forecast.binding)


def test_where_that_is_not_enough_parameters_and_gradients_move_there_too(of_state: Trace) -> None:
    assert smallest_bytes(of_state) < smallest_bytes(of_state, HOOKED) - STATE_BYTES // 8
    plan = at_the_smallest(of_state)
    (parameters,) = of_kind(plan, ParameterPlacement)
    assert isinstance(parameters, ParameterPlacement)
    assert parameters.tier == "host"
    assert of_kind(plan, OptimizerPlacement)


def test_saved_tensors_move_to_host_memory_and_wear_no_disk(of_activations: Trace) -> None:
    without = on_machine(of_activations, tiers=())
    assert smallest_bytes(of_activations) < smallest_bytes(without)
    plan = at_the_smallest(of_activations)
    assert of_kind(plan, Offload)
    steady = plan.forecast.phases["steady_step"]
    assert (steady.host_bytes or 0) > 0
    assert steady.disk_bytes is None
    assert any("go to host memory and come back in each step" in line for line in plan.forecast.binding)
    assert not any("disk" in line for line in plan.forecast.binding)


def test_a_plan_holds_no_more_of_host_memory_than_there_is_for_it(of_activations: Trace, of_state: Trace) -> None:
    held_bytes = at_the_smallest(of_activations).forecast.phases["steady_step"].host_bytes
    assert held_bytes is not None
    less = at_the_smallest(on_machine(of_activations, free_bytes=held_bytes // 2))
    assert (less.forecast.phases["steady_step"].host_bytes or 0) <= held_bytes // 2
    assert not of_kind(at_the_smallest(on_machine(of_state, free_bytes=STATE_BYTES // 2)), OptimizerPlacement)


def test_what_was_measured_of_the_link_decides_what_passes_it(of_activations: Trace) -> None:
    budget_bytes = smallest_bytes(of_activations) + (512 << 20)

    def moved_bytes(speed: float) -> int:
        link = on_machine(of_activations, write_bytes_per_second=speed, read_bytes_per_second=speed)
        return make_plan(link, Settings(budget_bytes=budget_bytes)).forecast.moved_bytes_per_step or 0

    assert moved_bytes(1e12) > moved_bytes(1e8)


def test_the_cpu_steps_where_that_is_allowed_and_it_was_measured_fast(of_state: Trace) -> None:
    def is_stepped_on_cpu(trace: Trace, *allow: str) -> bool:
        found = at_the_smallest(trace, *allow, parameters_stay=HOOKED)
        return bool(of_kind(found, StepOnCpu)) and not of_kind(found, OptimizerPlacement)

    fast, slow = (on_machine(of_state, cpu_step_bytes_per_second=speed) for speed in (1e12, 1e9))
    assert is_stepped_on_cpu(fast, "cpu-optimizer-step")
    assert not is_stepped_on_cpu(fast)
    assert not is_stepped_on_cpu(slow, "cpu-optimizer-step")


def test_a_refusal_never_tells_less_than_was_asked_for(of_state: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a bound that no plan gets down to WHEN a budget above it is refused THEN one is told that a plan has."""
    least_bytes = smallest_bytes(of_state)
    monkeypatch.setattr(RecordingSearch, "_least_plan_bytes", least_bytes // 2)
    with pytest.raises(InfeasibleError) as error:
        make_plan(of_state, Settings(budget_bytes=int(0.8 * least_bytes)))
    told_bytes = error.value.smallest_feasible_bytes
    assert 0.8 * least_bytes < told_bytes < 1.1 * least_bytes
    assert make_plan(of_state, Settings(budget_bytes=told_bytes)).actions
