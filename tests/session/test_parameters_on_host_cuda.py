"""A plan for a device that has no room for gradients has parameters and gradients in host memory; a run holds it."""

import gc
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import msgspec
import pytest
import torch
from fake_steps import record_fake
from optimizer_runs import digest_of_training
from torch import Tensor, nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.hardware import hardware_named
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.predict.cuda.translate import recording_for, translated
from memwall.session.session import Session
from memwall.trace.workload import Workload

pytestmark = [pytest.mark.phantom(card="a100-80gb"), pytest.mark.timeout(300)]
MIB = 1 << 20
WIDTH, NUM_LAYERS = 1024, 12
MODEL_BYTES = 4 * NUM_LAYERS * WIDTH * WIDTH
HARDWARE = hardware_named("a100-80gb")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


def made() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))


def stepping(parameters: Iterable[Any], **settings: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, **(settings or {"foreach": False}))


def plan_for(share: float, **settings: bool) -> tuple[Plan, Plan]:
    """The plan under which nothing needs to be done, and that for so much of its bytes beside the device's own."""
    workload = Workload(
        model=made,
        batch=lambda: torch.ones(8, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: stepping(parameters, **settings),
    )
    recording = recording_for(HARDWARE)
    fake = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    trace = translated(fake, HARDWARE, host_bytes=1 << 30)
    asked = Settings(budget_bytes=HARDWARE.usable_bytes, hardware=HARDWARE)
    ample = make_plan(trace, asked)
    base_bytes = HARDWARE.context_bytes[0]
    own_bytes = ample.forecast.peak.process_bytes - base_bytes
    return ample, make_plan(trace, msgspec.structs.replace(asked, budget_bytes=base_bytes + int(share * own_bytes)))


def trained(plan: Plan | None, num_steps: int = 4, **settings: bool) -> tuple[str, int]:
    """Returns a digest of weights and state, and the most bytes that the last step held.

    The allocator has started with other settings than the plan may ask for; what it reserves without them is more.
    """
    if plan is not None:
        actions = tuple(one for one in plan.actions if not isinstance(one, AllocatorReuse))
        forecast = msgspec.structs.replace(plan.forecast, actions=actions, budget_bytes=HARDWARE.usable_bytes)
        plan = msgspec.structs.replace(plan, forecast=forecast)
    torch.manual_seed(0)
    model = made().cuda()
    optimizer = stepping(list(model.parameters()), **settings)
    with nullcontext() if plan is None else memwall.fit(model, optimizer, plan=plan):
        for step in range(num_steps):
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(step)
            model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak_bytes = torch.cuda.max_memory_allocated()
    return digest_of_training(model, optimizer), peak_bytes


@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_plan_for_less_than_state_leaves_has_parameters_on_the_host_and_the_device_holds_what_is_foreseen(
    settings: dict[str, bool],
) -> None:
    _, plan = plan_for(0.39, **settings)
    (action,) = (one for one in plan.actions if isinstance(one, ParameterPlacement))
    steady = plan.forecast.phases["steady_step"]
    assert (action.tier, action.exactness) == ("host", "bit-exact")
    assert any("of parameters and gradients are in host memory" in line for line in plan.forecast.binding)
    assert (steady.host_bytes or 0) > 2 * MODEL_BYTES  # the state alone
    assert plan.forecast.phases["build"].allocated_bytes >= MODEL_BYTES
    plain, plain_bytes = trained(None, **settings)
    found, held_bytes = trained(plan, **settings)
    assert found == plain
    assert held_bytes == pytest.approx(steady.allocated_bytes, rel=0.01)
    assert held_bytes < plain_bytes / 2


def test_what_does_not_fit_while_it_is_built_is_refused() -> None:
    with pytest.raises(InfeasibleError):
        plan_for(0.2)


SMALL_CONTEXT = pytest.mark.phantom(card="a100-80gb", context_bytes=32 * MIB)


def ran(budget_bytes: int, **settings: bool) -> tuple[str, Session]:
    """Returns a digest of weights and state after five steps within a budget, the first of which is recorded."""
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = made().cuda()
    optimizer = stepping(list(model.parameters()), **settings)
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for step in range(5):
            torch.manual_seed(step)
            model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return digest_of_training(model, optimizer), session


@SMALL_CONTEXT
@pytest.mark.parametrize("settings", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_a_run_starts_whose_first_step_has_no_room_for_gradients(settings: dict[str, bool]) -> None:
    """GIVEN less than parameters, gradients and state WHEN it is told how little would do THEN that holds."""
    expected, _ = trained(None, num_steps=5, **settings)
    gc.collect()
    told_bytes = refused(100 * MIB, **settings)
    gc.collect()
    found, session = ran(told_bytes, **settings)
    assert found == expected
    assert session.measured.overall_peak_bytes <= told_bytes < 4 * MODEL_BYTES + 32 * MIB
    assert session.plan is not None
    assert any(isinstance(one, ParameterPlacement) for one in session.plan.actions)
    # Weights that autograd saves come and go as parameters alone, so that a step needs no workspace for them.
    assert session.trace is not None
    assert session.trace.workspace_bytes < MIB
    assert session.plan.forecast.phases["steady_step"].process_bytes == session.measured.last_peak_bytes


@SMALL_CONTEXT
@pytest.mark.parametrize("budget", [164, 188, 204])
def test_segments_are_foreseen_of_each_parameter_and_gradient_that_passes(budget: int) -> None:
    """GIVEN parameters some of which stay WHEN steps run THEN the allocator holds what was foreseen, to the byte."""
    _, session = ran(budget * MIB, foreach=True)
    assert session.plan is not None
    assert any(isinstance(one, ParameterPlacement) for one in session.plan.actions)
    assert session.plan.forecast.phases["steady_step"].process_bytes == session.measured.last_peak_bytes


def refused(budget_bytes: int, **settings: bool) -> int:
    """Returns the budget that a refusal tells, without the frames that hold what was trained."""
    try:
        ran(budget_bytes, **settings)
    except InfeasibleError as error:
        return error.smallest_feasible_bytes
    raise AssertionError("was not refused")


@SMALL_CONTEXT
def test_a_budget_without_room_for_two_layers_is_refused_with_one_that_has_it() -> None:
    """GIVEN less than comes back to the first step at once WHEN that has ended THEN the run is refused as others are:
    that parameters come back is no operation, which would get its memory by itself."""
    assert 4 * MODEL_BYTES + 32 * MIB > refused(36 * MIB) > MODEL_BYTES + 32 * MIB


@SMALL_CONTEXT
def test_parts_of_a_batch_clipping_an_evaluation_and_a_state_dict_see_the_same() -> None:
    def run(budget_bytes: int) -> tuple[str, list[float], int]:
        torch.manual_seed(0)
        model, seen = made().cuda(), list[float]()
        optimizer = stepping(list(model.parameters()))
        fitted = memwall.fit(model, optimizer, budget=budget_bytes) if budget_bytes else nullcontext()
        with fitted as session:
            for step in range(5):
                for part in range(2):
                    torch.manual_seed(10 * step + part)
                    model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
                seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
                optimizer.step()
                optimizer.zero_grad()
                model.eval()
                with torch.no_grad():
                    seen.append(float(model(torch.ones(4, WIDTH, device="cuda")).sum()))
                model.train()
                seen.append(sum(float(value.double().sum()) for value in model.state_dict().values()))
        return digest_of_training(model, optimizer), seen, 0 if session is None else session.measured.overall_peak_bytes

    expected = run(0)[:2]
    gc.collect()
    torch.cuda.empty_cache()
    *found, peak_bytes = run(190 * MIB)
    assert tuple(found) == expected
    assert peak_bytes <= 190 * MIB
