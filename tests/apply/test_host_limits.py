"""The host's memory is bounded before the kernel bounds it: pinned memory, and a budget that is more than there is."""

import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans import a_plan
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memwall
from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.offload import machine_below, parking
from memwall.apply.offload.parking import Parked
from memwall.apply.optimizer_state import open_state
from memwall.apply.optimizer_state.open_state import can_place, why_not_on_cpu
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.techniques import cpu_step, offload
from memwall.errors import StoreError
from memwall.machine import limits
from memwall.machine.limits import memory_limit_bytes
from memwall.machine.tiers import Tier
from memwall.planning.action import Action
from memwall.planning.settings import Settings
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.session import live_plan, plan_in_effect, recorded_step
from memwall.session.live_plan import LivePlan
from memwall.session.measurements import Measurements
from memwall.session.step_borders import StepBorders
from memwall.units import format_bytes

GIB = 1 << 30
PINNED = OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=1, min_bytes=1, saved_bytes=GIB)
OUT = Offload(block="0", scope="saved", tier="host", window_bytes=1, min_bytes=1)


def on_cuda(make: Any) -> torch.optim.Optimizer:
    """An optimizer whose parameters say that they are on a CUDA device."""
    optimizer: torch.optim.Optimizer = make([torch.ones(1)], lr=0.1)
    parameter = SimpleNamespace(
        device=torch.device("cuda", 0), dtype=torch.float32, grad=None, stride=lambda: (), size=lambda: ()
    )
    optimizer.param_groups[0]["params"] = [parameter]
    return optimizer


class OnCuda(torch.nn.Module):
    """Stands in for a model on a CUDA device, of which there is none here."""

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        storage = torch.ones(1).untyped_storage
        yield SimpleNamespace(device=torch.device("cuda"), requires_grad=False, untyped_storage=storage)


def test_pinned_memory_leaves_four_tenths_of_what_the_host_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_memory_bytes", lambda **_: 1000)
    engine, close = parking.open_engine([OnCuda()], disk=None, capacity_bytes=None, window_bytes=1, min_bytes=1)
    close()
    assert engine._host_limit_bytes == 600


def test_the_recorded_step_and_plans_from_it_have_the_same_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.device, int]] = []

    def measured(device: torch.device, *, limit_bytes: int) -> Tier:
        asked.append((device, limit_bytes))
        return Tier(name="host", write_bytes_per_second=2e10, read_bytes_per_second=1e10, free_bytes=limit_bytes)

    monkeypatch.setattr(machine_below, "probe_link", measured)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card that nobody knows")
    parked = Parked([OnCuda()], disk=None, capacity_bytes=None, window_bytes=1, min_bytes=1, host_limit_bytes=5 * GIB)
    parked.close()
    assert asked == [(torch.device("cuda"), 5 * GIB)]
    assert parked.min_bytes == parked.engine._min_bytes == 1
    (host,) = parked.machine.tiers
    assert parked.engine._host_limit_bytes == host.free_bytes == 5 * GIB


@pytest.mark.parametrize("error", [StoreError("the driver refuses to pin"), torch.OutOfMemoryError("out of memory")])
def test_where_the_link_cannot_be_measured_saved_tensors_stay_in_the_recorded_step(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Tier:
        raise error

    monkeypatch.setattr(machine_below, "probe_link", refused)
    parked = Parked([OnCuda()], disk=None, capacity_bytes=None, window_bytes=1, min_bytes=1, host_limit_bytes=5 * GIB)
    parked.close()
    assert parked.min_bytes == parked.engine._min_bytes == sys.maxsize


@pytest.mark.slow
def test_saved_tensors_that_stay_in_the_recorded_step_are_no_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a step recorded with all of them on the device WHEN it is replayed THEN the replay keeps them there."""

    class Keeping(Parked):
        def __init__(self, roots: Sequence[torch.nn.Module], **options: Any) -> None:
            super().__init__(roots, **(options | {"min_bytes": sys.maxsize}))

    monkeypatch.setattr(recorded_step, "Parked", Keeping)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(8)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget=memory_limit_bytes(), disk=str(tmp_path)) as session:
        for _ in range(2):
            model(torch.ones(8192, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        trace = session._live.trace
    assert trace is not None
    assert trace.workspace_bytes < sum(saved.nbytes for saved in trace.steps[0].saved) // 4


@pytest.fixture
def live() -> LivePlan:
    """Of a run that was told what to take of a disk and of host memory."""
    settings = Settings(budget_bytes=1 << 40, allow=("cpu-optimizer-step", "kernels"))
    return LivePlan(
        settings,
        None,
        borders=StepBorders(SimpleNamespace()),  # type: ignore[arg-type]
        measured=Measurements(),
        on_plan=lambda: None,
        set_by_loop=(),
        disk_capacity_bytes=7,
        host_capacity_bytes=2 * GIB,
    )


@pytest.mark.parametrize(("can_pin_bytes", "expected_bytes"), [(8 * GIB, 2 * GIB), (GIB, GIB)])
def test_a_plan_is_made_applied_and_recorded_for_with_the_same_host_memory(
    live: LivePlan, can_pin_bytes: int, expected_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    def taken(*_: Any, host_limit_bytes: int, **__: Any) -> SimpleNamespace:
        told.append(host_limit_bytes)
        return SimpleNamespace(apply=lambda: done.append("applied"))

    def left(*_: Any, host_limit_bytes: int, **__: Any) -> bool:
        told.append(host_limit_bytes)
        return False

    done: list[str] = []
    monkeypatch.setattr(ParameterKeeper, "spill_recorded", left)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("cache given back"))
    monkeypatch.setattr(plan_in_effect, "pinnable_bytes", lambda **_: can_pin_bytes)
    monkeypatch.setattr(live_plan, "RecordedStep", taken)
    monkeypatch.setattr(plan_in_effect, "AppliedPlan", taken)
    monkeypatch.setattr(Measurements, "begin_plan", lambda *_: None)
    live._borders.model = OnCuda()
    live.begin()
    made_with = live._present_settings()
    # What the host has free may change: what the plan was made with counts.
    monkeypatch.setattr(plan_in_effect, "pinnable_bytes", lambda **_: 3)
    live.plan = a_plan(device="cuda")
    live.apply()
    assert [*told, made_with.tier_capacity_bytes] == 4 * [expected_bytes]
    # State that comes back lies in segments of its own; what has left the device by then is torch's still.
    assert done == ["cache given back", "applied", "cache given back"]


def test_a_plan_on_a_cpu_has_the_disk_that_was_given(live: LivePlan) -> None:
    live._borders.model = torch.nn.Linear(2, 2)
    assert live._present_settings().tier_capacity_bytes == 7


def test_the_cpu_is_not_planned_with_where_it_could_not_step_the_optimizer(live: LivePlan) -> None:
    adam = on_cuda(torch.optim.AdamW)
    live._borders.model, live._borders.optimizers = OnCuda(), (adam,)
    assert live._present_settings().allow == ("cpu-optimizer-step", "kernels")
    capturable = on_cuda(torch.optim.AdamW)
    capturable.param_groups[0]["capturable"] = True
    live._borders.optimizers = (capturable,)
    assert live._present_settings().allow == ("kernels",)
    assert "counts its steps on the device" in (why_not_on_cpu(capturable) or "")


def test_state_of_parameters_on_cuda_can_be_away_unless_the_run_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = on_cuda(torch.optim.SGD)
    assert can_place(optimizer)
    assert can_place([optimizer, on_cuda(torch.optim.AdamW)])
    assert not can_place([on_cuda(torch.optim.AdamW) for _ in range(9)])
    optimizer.param_groups[0]["differentiable"] = True
    assert not can_place(optimizer)
    adam = on_cuda(torch.optim.AdamW)
    monkeypatch.setattr(open_state, "kept_space", object)
    assert not can_place(adam)
    assert "each step of this run is committed to disk" in (why_not_on_cpu(adam) or "")


@pytest.mark.parametrize(
    ("actions", "expected_bytes"), [((OUT,), 3 * GIB), ((PINNED, OUT), 2 * GIB)], ids=["alone", "beside state"]
)
def test_saved_tensors_get_the_host_memory_that_the_plan_has_not_meant_for_state(
    actions: tuple[Action, ...], expected_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []

    class Asked(Exception):
        pass

    def opened(*_: Any, host_limit_bytes: int, **__: Any) -> None:
        told.append(host_limit_bytes)
        raise Asked

    monkeypatch.setattr(offload, "open_engine", opened)
    made = AppliedPlan(
        OnCuda(),
        actions,
        block_order=(),
        disk=None,
        disk_capacity_bytes=7,
        allocator=AllocatorHandler(),
        micro=MicroBatches(),
        keeper=StateKeeper(None, None),
        parameters=ParameterKeeper(None, None),
        is_cooperative=False,
        host_limit_bytes=3 * GIB,
    )
    with pytest.raises(Asked):
        made.apply()
    assert told == [expected_bytes]


def test_how_fast_the_cpu_steps_is_measured_unseen_by_who_watches_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_step, "_NUM_ELEMENTS", 1 << 10)
    seen: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        assert cpu_step._bytes_per_second(torch.float32) > 0
    finally:
        handle.remove()
    assert not seen


@pytest.mark.slow
def test_a_budget_above_the_limit_in_force_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN more than the machine has WHEN the plan is made THEN it says so, with the limit."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget=memory_limit_bytes() * 2, disk=str(tmp_path)) as session:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        session.end_step()
    found = (
        f"the budget of {format_bytes(memory_limit_bytes() * 2)} is more than the {format_bytes(memory_limit_bytes())}"
    )
    assert found in caplog.text
    assert [record.levelno for record in caplog.records if found in record.getMessage()] == [logging.WARNING]
