"""A plan for a device whose host has no room for the optimizer's state has it on disk, and a run holds what it says."""

import gc
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from fake_steps import record_fake
from optimizer_runs import digest_of_training, resident_state_bytes
from plans import a_plan
from torch import nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.hardware import hardware_named
from memwall.machine.tiers import Tier
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES, OptimizerPlacement
from memwall.predict.cuda.translate import recording_for, translated
from memwall.session.session import Session
from memwall.trace.modules import fingerprint
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

pytestmark = [pytest.mark.phantom(card="a100-80gb"), pytest.mark.timeout(300)]
MIB = 1 << 20
WIDTH, NUM_LAYERS = 1024, 12
STATE_BYTES = 2 * 4 * NUM_LAYERS * WIDTH * WIDTH
HOST_BYTES = 64 * MIB
"""Less than the state, and enough for what passes through."""
HARDWARE = hardware_named("a100-80gb")
DISK = Tier(name="disk", directory="/", write_bytes_per_second=2e9, read_bytes_per_second=3e9, free_bytes=1 << 40)


def made() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))


def stepping(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def a_trace(host_bytes: int) -> Trace:
    workload = Workload(
        model=made,
        batch=lambda: torch.ones(8, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=stepping,
    )
    recording = recording_for(HARDWARE)
    fake = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    trace = translated(fake, HARDWARE, host_bytes=host_bytes)
    return msgspec.structs.replace(
        trace, machine=msgspec.structs.replace(trace.machine, tiers=(*trace.machine.tiers, DISK))
    )


def plans(*, host_bytes: int = HOST_BYTES, no_disk: bool = False) -> tuple[Plan, Plan]:
    """The plan under which nothing needs to be done, and that for a budget which moved state alone meets."""
    trace = a_trace(host_bytes)
    settings = Settings(budget_bytes=HARDWARE.usable_bytes, hardware=HARDWARE)
    ample = make_plan(trace, settings)
    budget_bytes = ample.forecast.peak.process_bytes - STATE_BYTES // 4
    return ample, make_plan(trace, msgspec.structs.replace(settings, budget_bytes=budget_bytes, no_disk=no_disk))


def placement_of(plan: Plan) -> OptimizerPlacement:
    (found,) = (action for action in plan.actions if isinstance(action, OptimizerPlacement))
    return found


def without_settings(plan: Plan) -> Plan:
    """Returns a plan without what it sets of an allocator before CUDA starts: here it has, and no block is another."""
    kept = tuple(action for action in plan.actions if not isinstance(action, AllocatorReuse))
    return msgspec.structs.replace(plan, forecast=msgspec.structs.replace(plan.forecast, actions=kept))


def trained(plan: Plan | None, disk: Path) -> tuple[str, int]:
    """Returns a digest of weights and state, and the most bytes that the last step held."""
    plan = None if plan is None else without_settings(plan)
    torch.manual_seed(0)
    model = made().cuda()
    optimizer = stepping(list(model.parameters()))
    with nullcontext() if plan is None else memwall.fit(model, optimizer, plan=plan, disk=str(disk)):
        for step in range(4):
            torch.cuda.reset_peak_memory_stats()
            torch.manual_seed(step)
            model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peak_bytes = torch.cuda.max_memory_allocated()
    return digest_of_training(model, optimizer), peak_bytes


def test_state_that_the_host_has_no_room_for_is_on_disk_and_the_device_holds_what_is_foreseen(tmp_path: Path) -> None:
    ample, plan = plans()
    action, forecast = placement_of(plan), plan.forecast
    assert (action.tier, action.exactness) == ("disk", "bit-exact")
    steady = forecast.phases["steady_step"]
    assert steady.disk_bytes == forecast.peak.disk_bytes == action.saved_bytes
    assert 0 < action.staging_bytes <= HOST_BYTES
    assert (steady.host_bytes or 0) - (ample.forecast.phases["steady_step"].host_bytes or 0) == action.staging_bytes
    assert forecast.moved_bytes_per_step == action.saved_bytes
    assert any("are read from disk and written in each step, through" in line for line in forecast.binding)
    assert any("are written to the disk in a day of such steps" in line for line in forecast.binding)
    plain, plain_bytes = trained(None, tmp_path)
    found, held_bytes = trained(plan, tmp_path)
    assert found == plain
    assert held_bytes == pytest.approx(steady.allocated_bytes, rel=0.01)
    assert plain_bytes - held_bytes > STATE_BYTES // 5


def test_the_host_is_nearer_and_without_writes_nothing_goes_to_disk() -> None:
    assert placement_of(plans(host_bytes=1 << 30)[1]).tier == "host"
    with pytest.raises(InfeasibleError):
        plans(no_disk=True)


def test_the_disk_hides_the_link_and_the_optimizers_step() -> None:
    action = placement_of(plans()[1])
    saved_bytes = action.saved_bytes or 0
    disk_seconds = saved_bytes * (1 / DISK.read_bytes_per_second + 1 / DISK.write_bytes_per_second)
    assert action.cost_seconds == pytest.approx(disk_seconds, rel=0.05)


def recorded(disk: Path, *, host_bytes: int, no_disk: bool = False) -> Session:
    """A session whose budget has room for everything."""
    model = made().cuda()
    optimizer = stepping(model.parameters())
    told = {"disk": str(disk), "no_disk": no_disk, "host_capacity_bytes": host_bytes}
    with Session(budget_bytes=8 << 30, plan=None, allow=(), **told) as session:
        session.attach(model, [optimizer])
        for _ in range(2):
            model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.trace is not None
    return session


@pytest.mark.phantom(numbers=False)
def test_a_session_measures_the_disk_where_its_host_may_lack_room_and_its_trace_is_planned_with_it(
    tmp_path: Path,
) -> None:
    def tiers(host_bytes: int, *, no_disk: bool = False) -> list[str]:
        session = recorded(tmp_path, host_bytes=host_bytes, no_disk=no_disk)
        assert session.trace is not None
        return [tier.name for tier in session.trace.machine.tiers]

    assert tiers(1 << 30) == ["host"]
    assert tiers(HOST_BYTES, no_disk=True) == ["host"]
    session = recorded(tmp_path, host_bytes=HOST_BYTES)
    assert session.trace is not None
    assert session.plan is not None
    assert [tier.name for tier in session.trace.machine.tiers] == ["host", "disk"]
    whole_bytes = session.plan.forecast.steady_process_bytes
    plan = make_plan(session.trace, Settings(budget_bytes=whole_bytes - STATE_BYTES // 4))
    action = placement_of(plan)
    assert (action.tier, plan.forecast.peak.disk_bytes) == ("disk", action.saved_bytes)
    assert plan.forecast.peak.host_bytes == action.staging_bytes
    del session
    gc.collect()
    torch.cuda.empty_cache()
    _, held_bytes = trained(plan, tmp_path)
    assert held_bytes == pytest.approx(plan.forecast.phases["steady_step"].allocated_bytes, rel=0.01)


def test_the_state_of_two_optimizers_is_in_host_memory_between_steps() -> None:
    def run(plan: Plan | None) -> tuple[list[str], int]:
        torch.manual_seed(0)
        model = made().cuda()
        optimizers = [stepping(model[:4].parameters()), torch.optim.Adam(model[4:].parameters(), lr=1e-3)]
        with nullcontext() if plan is None else memwall.fit(model, optimizers, plan=plan):
            for step in range(4):
                torch.manual_seed(step)
                model(torch.randn(8, WIDTH, device="cuda")).square().mean().backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            resident_bytes = sum(resident_state_bytes(optimizer) for optimizer in optimizers)
        return [digest_of_training(model, optimizer) for optimizer in optimizers], resident_bytes

    placed = OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=8 * MIB, min_bytes=MIN_STATE_BYTES)
    plain, plain_bytes = run(None)
    plan = a_plan(placed, device="cuda", model_fingerprint=fingerprint([made()]), process_bytes=1)
    found, held_bytes = run(plan)
    assert found == plain
    assert plain_bytes > STATE_BYTES
    assert held_bytes < MIN_STATE_BYTES * 2 * NUM_LAYERS
