"""A step that has no room for its parameters: on disk while it is recorded, and when it is done again."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from placed_runs import PARAMETERS, STATE, differing, made, plan_for, train
from plans import plan_of
from streamed_models import GPT, KIB, everything, loss_of
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memwall
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.streaming import parameter_keeper, room_in_memory
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.apply.streaming.parameter_streaming import ParameterStreaming
from memwall.planning.menu import WINDOW_BYTES
from memwall.predict.first_step import FirstStep
from memwall.session import live_plan
from memwall.session.live_plan import Revision
from memwall.session.session import Session
from memwall.trace.records import Trace

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(params=[True, False], ids=["gradients dropped", "gradients zeroed"])
def set_to_none(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_first_step_without_room_has_parameters_on_disk_until_a_plan_brings_them_back(
    without_room: None, set_to_none: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, scheduler = made()
    plain_numbers = train(model, optimizer, scheduler, set_to_none=set_to_none)
    plain = everything(model, optimizer)

    model, optimizer, scheduler = made()
    away: list[int] = []
    with memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) as session:
        numbers = train(
            model,
            optimizer,
            scheduler,
            after=lambda: away.append(session._live.in_effect.parameters.away_bytes),
            set_to_none=set_to_none,
        )
        assert session.plan is not None
        assert session.plan.actions == ()
    assert away[0] > 400 * KIB
    assert away[1:] == [0] * 3
    assert numbers == plain_numbers
    assert differing(plain, everything(model, optimizer)) == []


def test_a_step_that_is_recorded_once_more_leaves_them_where_they_are(without_room: None, tmp_path: Path) -> None:
    model, optimizer, _ = made()
    keeper, allocator = ParameterKeeper(str(tmp_path), None), AllocatorHandler()
    for _ in range(2):
        assert keeper.spill_recorded(model, optimizer, allocator, budget_bytes=1 << 40)
        assert keeper.absent_bytes > 400 * KIB
    keeper.bring_back()


@pytest.mark.parametrize("left_mib", [30, 50], ids=["nothing left for operators", "some left"])
def test_a_budget_must_have_room_for_what_layers_compute_too(
    left_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN room for gradients and for what passes to disk THEN a first step in memory passed its budget."""
    meter = SimpleNamespace(device="cpu", now_bytes=lambda: 400 << 20)
    monkeypatch.setattr(room_in_memory, "meter_of", lambda _: meter)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    budget_bytes = (400 + left_mib << 20) + WINDOW_BYTES + sum(one.nbytes for one in model.parameters())
    keeper = ParameterKeeper(str(tmp_path), None)
    optimizer = torch.optim.Adam(model.parameters())
    assert keeper.spill_recorded(model, optimizer, AllocatorHandler(), budget_bytes=budget_bytes) == (left_mib == 30)
    keeper.bring_back()


def test_a_first_step_with_parameters_in_memory_is_foreseen_with_its_optimizer(
    without_room: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN large weights WHEN their step was recorded in parts THEN whole it has state and temporaries beside all."""
    found: list[tuple[FirstStep, Trace]] = []
    monkeypatch.setattr(live_plan, "with_loaders", lambda first, trace: found.append((first, trace)) or first)
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(2048, 1024, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)):
        for _ in range(2):
            model(torch.ones(2, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (first, trace), *_ = found
    weights_and_gradients, state_and_temporaries = 2 * 2 * (8 << 20), (2 + 2) * (8 << 20)
    assert first.in_memory_bytes >= trace.base_bytes + weights_and_gradients + state_and_temporaries


def test_layers_that_are_not_trained_do_not_bring_all_back_before_a_first_step(
    without_room: None, tmp_path: Path
) -> None:
    """GIVEN a frozen layer, which no optimizer has WHEN a first step has no room THEN it is stepped in parts."""
    model = GPT()
    model.layers[1].requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    with memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) as session:
        loss_of(model, 0).backward()
        optimizer.step()
        assert session._live.in_effect.keeper.is_away
        assert session._live.in_effect.parameters.absent_bytes > 0


def test_an_optimizer_that_cannot_be_stepped_in_parts_brings_them_back_before_its_step(
    without_room: None, tmp_path: Path
) -> None:
    found = []
    for is_under_session in (False, True):
        torch.manual_seed(0)
        model = GPT()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        if is_under_session:
            session = Session(budget_bytes=1 << 40, disk=str(tmp_path))
            session.attach(model, None)
            handle = register_optimizer_step_pre_hook(lambda found, *_, session=session: session.add_optimizer(found))
            closure()
            assert session._live.in_effect.parameters.away_bytes > 0
        else:
            closure()
        optimizer.step(closure)
        if is_under_session:
            assert session._live.in_effect.parameters.away_bytes == 0
            handle.remove()
            session.close()
        found.append(everything(model))
    assert differing(*found) == []


def test_parameters_stay_away_while_one_plan_follows_another(
    without_room: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler)
    plain = everything(model, optimizer)
    opened: list[ParameterStreaming] = []
    opening = parameter_keeper.open_parameter_streaming

    def counted(*args: Any, **settings: Any) -> Any:
        found = opening(*args, **settings)
        opened.append(found[0])
        return found

    monkeypatch.setattr(parameter_keeper, "open_parameter_streaming", counted)
    model, optimizer, scheduler = made()
    with memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) as session:
        session.on_plan = lambda ready: setattr(ready._live, "plan", plan_for(model))
        train(model, optimizer, scheduler, num_steps=2)
        assert session.trace is not None
        session._live.change_to(Revision(session.trace, plan_for(model), session.budget_bytes))
        train(model, optimizer, scheduler, first=2, num_steps=2)
    assert len(opened) == 1
    assert differing(plain, everything(model, optimizer)) == []


# A step that is done again.


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_that_ran_out_of_memory_is_done_again_with_parameters_where_they_are(
    place: str, without_room: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        armed.handle.remove()
        armed.num_failures += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has no more")

    def arm(model: GPT) -> None:
        if place == "forward":
            armed.handle = model.layers[2].up.register_forward_pre_hook(fail)
        else:
            armed.handle = model.layers[2].up.register_full_backward_hook(fail)

    armed: Any = SimpleNamespace(num_failures=0)  # a list would be put back for the second run
    found = []
    for is_planned in (False, True):
        model, optimizer, _ = made()
        session = memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) if is_planned else None
        if session is not None:
            session.on_plan = lambda ready, model=model: setattr(ready._live, "plan", plan_for(model))
            monkeypatch.setattr(
                "memwall.session.live_plan.make_plan",
                lambda *_, model=model: plan_of(model, PARAMETERS, msgspec.structs.replace(STATE, cost_seconds=1.0)),
            )
        for step in range(3):
            if session is None:
                loss_of(model, step).backward()
            else:
                if step == 1:
                    arm(model)
                session.compute_gradients(torch.tensor([step]), lambda seed, model=model: loss_of(model, int(seed)))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        if session is not None:
            assert session.measured.oom_recoveries == 1
            assert session._live.in_effect.parameters.away_bytes > 400 * KIB
            session.close()
        found.append(everything(model, optimizer))
    assert armed.num_failures == 1
    assert differing(*found) == []


def test_a_gradient_penalty_in_a_first_step_without_room_brings_all_back(without_room: None, tmp_path: Path) -> None:
    """GIVEN a backward that is differentiated itself WHEN parameters were on disk THEN the run was refused."""
    found = []
    for is_under_session in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fitted = memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) if is_under_session else None
        with fitted or nullcontext() as session:
            for _ in range(3):
                x = torch.randn(8, 64, requires_grad=True)
                out = model(x)
                (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            if session is not None:
                assert session._live.in_effect.parameters.away_bytes == 0
        found.append(everything(model, optimizer))
    assert differing(*found) == []
