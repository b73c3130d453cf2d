"""A device's optimizer stepped on the CPU, as a plan has it: what that costs, when it is chosen, what is refused."""

from typing import Any

import msgspec
import pytest
import torch
from fake_steps import record_fake
from located import state_placements, step_on_cpu
from plans import on_machine
from torch import nn

import memwall
from memwall.errors import UsageError
from memwall.machine.hardware import Hardware
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.step_under_plan import step_under_actions
from memwall.planning.techniques.cpu_step import TECHNIQUE, StepOnCpu
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES, OptimizerPlacement
from memwall.predict.cpu_step_pipeline import NUM_STAGES, gradient_bytes, pipelined_seconds, staging_bytes
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.curve import live_curve
from memwall.predict.state_on_disk import movable_state_bytes
from memwall.report.plan_grids import action_grid
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.workload import Workload

WIDTH, NUM_LAYERS = 1024, 24
HOST_BYTES = 64 << 30
MATRIX_BYTES = 4 * WIDTH * WIDTH
ALLOWED = ("cpu-optimizer-step",)
HOW = "make the plan with `memwall plan SPEC --device NAME --host SIZE --allow cpu-optimizer-step`"
FAST, SLOW = 1e12, 1e9
"""Bytes per second, as of no CPU in particular."""

pytestmark = pytest.mark.usefixtures("one_thread")


class Layers(nn.Sequential):
    """A sequence whose layers are blocks each by itself: with a forward of its own no run of them is computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = layer(x)
        return x


def traced(hardware: Hardware, optimizer: Any, dtype: torch.dtype = torch.float32, num_rows: int = 8) -> Trace:
    workload = Workload(
        model=lambda: Layers(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_LAYERS))),
        batch=lambda: torch.ones(num_rows, WIDTH, dtype=dtype),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=optimizer,
    )
    recording = recording_for(hardware)
    fake = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(fake, hardware, host_bytes=HOST_BYTES)


@pytest.fixture(scope="module")
def trace(hardware: Hardware) -> Trace:
    """A few rows through many matrices, stepped one by one, on a CPU that is fast."""
    found = traced(hardware, lambda parameters: torch.optim.AdamW(parameters, foreach=False))
    return on_machine(found, cpu_step_bytes_per_second=FAST)


def tight(trace: Trace, hardware: Hardware, *allow: str) -> Plan:
    """A plan that only state in host memory makes possible."""
    settings = Settings(budget_bytes=hardware.usable_bytes, hardware=hardware)
    least = make_plan(on_machine(trace, free_bytes=1), settings).forecast.smallest_feasible_budget_bytes
    assert least is not None
    budget_bytes = least - NUM_LAYERS * MATRIX_BYTES
    return make_plan(trace, msgspec.structs.replace(settings, budget_bytes=budget_bytes, allow=allow))


def placement_of(plan: Plan) -> StepOnCpu:
    (found,) = (action for action in plan.actions if isinstance(action, StepOnCpu))
    return found


def is_stepped_on_device(plan: Plan) -> bool:
    return any(isinstance(action, OptimizerPlacement) for action in plan.actions)


@pytest.mark.slow
def test_it_is_chosen_where_it_is_faster_and_allowed(trace: Trace, hardware: Hardware) -> None:
    assert is_stepped_on_device(tight(trace, hardware))
    slow = on_machine(trace, cpu_step_bytes_per_second=SLOW)
    unchanged = tight(slow, hardware, *ALLOWED)
    assert is_stepped_on_device(unchanged)
    assert any("/s as measured here, would make a step 0.7" in line for line in unchanged.forecast.binding)
    plan = tight(trace, hardware, *ALLOWED)
    action = placement_of(plan)
    assert action.exactness == "changes-numerics"
    assert plan.forecast.fits
    assert any(
        "in host memory, where the CPU steps it with torch's fused kernel at" in line for line in plan.forecast.binding
    )
    assert action_grid((action,)).rows[0][0] == "optimizer state to host, stepped on the CPU"


def test_it_costs_the_link_three_passes_of_the_parameters_or_the_cpu_seven_whichever_is_longer(trace: Trace) -> None:
    link = trace.machine.tiers[0].read_bytes_per_second
    step = steady_step(trace)
    parameter_bytes, computing = gradient_bytes(step), sum(o.seconds for o in step.ops if o.phase == "optimizer")

    def seconds(speed: float) -> float:
        machine = on_machine(trace, cpu_step_bytes_per_second=speed)
        found = step_on_cpu(machine, step, capacity_bytes=HOST_BYTES, allow=ALLOWED)
        assert found is not None
        assert found.cost_seconds is not None
        return found.cost_seconds + computing

    assert seconds(FAST) == pytest.approx(3 * parameter_bytes / link, rel=1e-6)
    edge_seconds = 3 * (16 << 20) / link
    # The first bucket's way down and the last one's way up, at most.
    assert 7 * parameter_bytes / SLOW < seconds(SLOW) < 7 * parameter_bytes / SLOW + edge_seconds
    through_device = state_placements(trace, step, capacity_bytes=HOST_BYTES)[-1]
    whole = max(p.cost_seconds or 0.0 for p in state_placements(trace, step, capacity_bytes=HOST_BYTES))
    assert through_device.cost_seconds is not None
    assert seconds(FAST) - computing < whole


def test_state_leaves_the_device_and_nothing_comes_in_its_place(trace: Trace) -> None:
    step = steady_step(trace)
    action = step_on_cpu(trace, step, capacity_bytes=HOST_BYTES, allow=ALLOWED)
    assert action is not None
    state_bytes = movable_state_bytes(step, MIN_STATE_BYTES)
    assert state_bytes == 2 * NUM_LAYERS * MATRIX_BYTES
    # Biases' as well, which would be too small to pass through the device.
    state_bytes += 2 * NUM_LAYERS * 4 * WIDTH
    assert action.saved_bytes == state_bytes
    before, after = (
        live_curve(s.storages, len(s.ops), device="cuda") for s in (step, step_under_actions(trace, step, (action,)))
    )
    assert {was - is_now for was, is_now in zip(before, after, strict=True)} == {state_bytes}


def test_the_host_holds_the_state_and_what_passes_through(trace: Trace, hardware: Hardware) -> None:
    plan = tight(trace, hardware, *ALLOWED)
    action = placement_of(plan)
    staged_bytes = staging_bytes(steady_step(trace), action.bucket_bytes)
    assert staged_bytes == NUM_STAGES * 2 * action.bucket_bytes
    ample = make_plan(trace, Settings(budget_bytes=hardware.usable_bytes, hardware=hardware))
    more = {
        name: (phase.host_bytes or 0) - (ample.forecast.phases[name].host_bytes or 0)
        for name, phase in plan.forecast.phases.items()
    }
    assert more["steady_step"] == (action.saved_bytes or 0) + staged_bytes
    assert more["save"] == 2 * (action.saved_bytes or 0) + staged_bytes
    step = steady_step(trace)
    room_bytes = (action.saved_bytes or 0) + staged_bytes
    assert step_on_cpu(trace, step, capacity_bytes=room_bytes, allow=ALLOWED) is not None
    assert step_on_cpu(trace, step, capacity_bytes=room_bytes - 1, allow=ALLOWED) is None


@pytest.mark.slow
def test_saved_tensors_get_what_the_host_has_left_beside_state_and_what_passes_through(hardware: Hardware) -> None:
    def plan(host_bytes: int, budget_bytes: int) -> Plan:
        machine = on_machine(trace, free_bytes=host_bytes)
        return make_plan(machine, Settings(budget_bytes=budget_bytes, hardware=hardware, allow=ALLOWED))

    found = traced(hardware, lambda parameters: torch.optim.AdamW(parameters, foreach=False), num_rows=8192)
    trace = on_machine(found, cpu_step_bytes_per_second=FAST)
    step = steady_step(trace)
    state_bytes = movable_state_bytes(step, 16)
    host_bytes = state_bytes + staging_bytes(step, 16 << 20) + 6 * 4 * 8192 * WIDTH
    ample = plan(host_bytes, hardware.usable_bytes).forecast
    least_bytes = ample.smallest_feasible_budget_bytes
    assert least_bytes is not None
    plans = [plan(host_bytes, least_bytes + more_bytes) for more_bytes in (0, 128 << 20)]
    assert placement_of(plans[-1])
    assert any(isinstance(action, Offload) for action in plans[-1].actions)
    for one in plans:
        always_bytes = ample.phases["steady_step"].host_bytes or 0
        assert (one.forecast.phases["steady_step"].host_bytes or 0) - always_bytes <= host_bytes


def test_what_moves_in_a_step_are_gradients_and_parameters_and_no_state(trace: Trace, hardware: Hardware) -> None:
    plan = tight(trace, hardware, *ALLOWED)
    assert placement_of(plan)
    assert plan.forecast.moved_bytes_per_step == 2 * gradient_bytes(steady_step(trace))


def test_buckets_overlap_and_what_is_one_alone_comes_down_is_stepped_and_goes_up() -> None:
    def seconds(*sizes: int, bucket_bytes: int = 1) -> float:
        return pipelined_seconds(sizes, bucket_bytes, down_seconds=2.0, up_seconds=1.0, cpu_seconds=4.0)

    assert seconds() == 0.0
    assert seconds(10) == 10 * (2 + 4 + 1)
    # The first comes down, both are stepped, the second goes up.
    assert seconds(10, 10) == 10 * (2 + 4 + 4 + 1)
    # The large one's step hides the way down of the small one, and the small one's that up of the large one in part.
    assert seconds(100, 1) == 100 * (2 + 4) + 100 + 1
    assert seconds(*[5] * 4, bucket_bytes=10) == seconds(10, 10)


def test_what_is_not_legal_says_why(trace: Trace, hardware: Hardware) -> None:
    def reason(changed: Trace, *allow: str) -> str:
        return TECHNIQUE.why_not(changed, allow) or ""

    assert reason(trace, *ALLOWED) == ""
    assert "allow it with --allow cpu-optimizer-step" in reason(trace, "precision")
    assert f"from CUDA only; the step is for 'cpu'; {HOW}" in reason(
        msgspec.structs.replace(trace, device="cpu"), *ALLOWED
    )
    assert "only Adam and AdamW" in reason(msgspec.structs.replace(trace, optimizer="SGD"), *ALLOWED)
    assert "pass --host SIZE" in reason(on_machine(trace, tiers=()), *ALLOWED)
    assert HOW in reason(on_machine(trace, cpu_step_bytes_per_second=0.0), *ALLOWED)
    lower = traced(hardware, torch.optim.AdamW, torch.bfloat16)
    assert HOW in reason(on_machine(lower, cpu_step_bytes_per_second=FAST), *ALLOWED)
    lower = on_machine(lower, cpu_step_bytes_per_second=FAST, cpu_step_bfloat16_bytes_per_second=FAST)
    assert reason(lower, *ALLOWED) == ""
    half = on_machine(traced(hardware, torch.optim.AdamW, torch.float16), cpu_step_bytes_per_second=FAST)
    assert "in float32 or bfloat16; here are some in float16" in reason(half, *ALLOWED)


def test_parameters_in_bfloat16_are_stepped_as_fast_as_was_measured_of_them(hardware: Hardware) -> None:
    """GIVEN a link that is no bound WHEN the kernel is four times as slow in bfloat16 THEN so is the step, by byte."""
    trace = traced(hardware, lambda parameters: torch.optim.AdamW(parameters, foreach=False), torch.bfloat16)
    step, (tier,) = steady_step(trace), trace.machine.tiers
    fast_link = msgspec.structs.replace(tier, read_bytes_per_second=1e15, write_bytes_per_second=1e15)
    machine = on_machine(
        trace,
        tiers=(fast_link,),
        cpu_step_bytes_per_second=4 * SLOW,
        cpu_step_bfloat16_bytes_per_second=SLOW,
    )
    found = step_on_cpu(machine, step, capacity_bytes=HOST_BYTES, allow=ALLOWED)
    assert found is not None
    assert found.cost_seconds is not None
    computing = sum(op.seconds for op in step.ops if op.phase == "optimizer")
    assert found.cost_seconds + computing == pytest.approx(7 * gradient_bytes(step) / SLOW, rel=1e-3)


def test_what_cannot_weigh_it_refuses_it_and_says_what_can(trace: Trace, hardware: Hardware) -> None:
    unmeasured = on_machine(trace, cpu_step_bytes_per_second=0.0)
    with pytest.raises(UsageError, match="cpu-optimizer-step: it is not known how fast the CPU steps; " + HOW):
        memwall.plan(unmeasured, budget="40GiB", hardware=hardware, allow=ALLOWED)


@pytest.mark.parametrize("has_cuda", [False, True])
def test_a_run_on_a_cpu_is_not_allowed_it(has_cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=f"whose model is on 'cpu', and .* move the model to CUDA first; .* {HOW}"):
        memwall.fit(model, torch.optim.Adam(model.parameters()), budget="1GiB", allow=ALLOWED)


def test_a_plan_without_a_step_on_the_cpu_does_not_speak_of_it() -> None:
    fields = {"kind": "optimizer-placement", "tier": "host", "resident_bytes": 0, "bucket_bytes": 2, "min_bytes": 1}
    action = msgspec.convert(fields, OptimizerPlacement)
    assert msgspec.to_builtins(action) == fields | {
        "staging_bytes": 0,
        "saved_bytes": None,
        "cost_seconds": None,
        "exactness": "bit-exact",
    }
    with pytest.raises(msgspec.ValidationError, match="a step on the device is bit-exact, not changes-numerics"):
        msgspec.convert(fields | {"exactness": "changes-numerics"}, OptimizerPlacement)
