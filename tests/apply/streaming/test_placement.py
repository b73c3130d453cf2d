"""Parameters on disk as a plan's action: applied and taken back by a session, the same bits, refused where need be."""

import gc
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from plans import plan_of
from streamed_models import GPT, KIB, everything, loss_of
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memwall
from memwall.apply.allocator import AllocatorHandler
from memwall.apply.session import Session
from memwall.apply.streaming import keeper as parameter_keeper
from memwall.apply.streaming.keeper import ParameterKeeper, why_not_streamed
from memwall.apply.streaming.parameters import ParameterStreaming
from memwall.errors import ApplyError, NoEffectError
from memwall.plan.actions import OptimizerPlacement, ParameterPlacement, Recompute
from memwall.plan.planfile import Plan

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

BLOCKS = tuple(f"layers.{number}" for number in range(4))
PARAMETERS = ParameterPlacement(
    tier="disk", blocks=BLOCKS, window_bytes=16 * KIB, min_bytes=4 * KIB, written_bytes=0, saved_bytes=1
)
STATE = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=4 * KIB)


def plan_for(model: nn.Module) -> Plan:
    return plan_of(model, PARAMETERS, STATE, Recompute(block="layers.1"), Recompute(block="layers.2"))


def made() -> tuple[GPT, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = GPT()
    matrices, rest = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    *,
    first: int = 0,
    num_steps: int = 4,
    after: Callable[[], None] = lambda: None,
    set_to_none: bool = True,
) -> list[float]:
    """Accumulates, clips by norm, steps, schedules, evaluates; every number that the loop sees."""
    numbers: list[float] = []
    for step in range(first, first + num_steps):
        for micro in range(2):
            loss = loss_of(model, 10 * step + micro)
            (loss / 2).backward()
            numbers.append(loss.item())
        numbers.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        after()
        with torch.no_grad():
            numbers.append(loss_of(model, 99).item())
    return numbers


@pytest.fixture(params=[True, False], ids=["gradients dropped", "gradients zeroed"])
def set_to_none(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not torch.equal(other[name], value)]


# A plan that was given.


@pytest.mark.parametrize(
    "staying", [BLOCKS[1:3], ("tokens", "positions", *BLOCKS, "head")], ids=["two blocks", "all that can leave"]
)
def test_parameters_that_a_plan_leaves_in_memory_have_only_their_gradients_on_disk(
    staying: tuple[str, ...], tmp_path: Path
) -> None:
    model, optimizer, scheduler = made()
    plain_numbers = train(model, optimizer, scheduler)
    plain = everything(model, optimizer)
    moved: dict[tuple[str, ...], int] = {}
    for stays in ((), staying):
        model, optimizer, scheduler = made()
        placement = msgspec.structs.replace(PARAMETERS, staying=stays)
        with memwall.fit(model, optimizer, plan=plan_of(model, placement, STATE), disk=str(tmp_path)) as session:
            numbers = train(model, optimizer, scheduler)
            keeper = session._live.parameters
            assert keeper.num_spilled > 4
            assert (keeper.away_bytes == 0) == (len(stays) > 2)
            present = [member.name for member in keeper._streaming._tier if member.values.is_here]
            if stays:
                assert any(name.startswith("layers.1.") for name in present)
        assert numbers == plain_numbers
        assert differing(plain, everything(model, optimizer)) == []
        moved[stays] = session.measured.bytes_from_tier
    assert moved[staying] < 0.8 * moved[()]


def test_what_stays_may_change_from_plan_to_plan(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler, num_steps=6)
    plain = everything(model, optimizer)
    model, optimizer, scheduler = made()
    away: list[int] = []

    def plan_with(*staying: str) -> Plan:
        return plan_of(model, msgspec.structs.replace(PARAMETERS, staying=staying), STATE)

    with memwall.fit(model, optimizer, plan=plan_with(*BLOCKS), disk=str(tmp_path)) as session:
        train(model, optimizer, scheduler, num_steps=2)
        for first, staying in ((2, ()), (4, BLOCKS[:1])):
            away.append(session._live.parameters.away_bytes)
            session._live._change_to(session.trace, plan_with(*staying), model, (optimizer,), is_running=False)
            train(model, optimizer, scheduler, first=first, num_steps=2)
        away.append(session._live.parameters.away_bytes)
    assert away[0] < away[2] < away[1]
    assert differing(plain, everything(model, optimizer)) == []


def test_a_plan_that_names_a_module_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    placement = msgspec.structs.replace(PARAMETERS, staying=("layers.9",))
    with (
        memwall.fit(model, optimizer, plan=plan_of(model, placement, STATE), disk=str(tmp_path)),
        pytest.raises(ApplyError, match=r"keeps the parameters of 'layers\.9' in memory, but the model has no such"),
    ):
        train(model, optimizer, scheduler)


def test_a_plan_with_parameters_on_disk_trains_to_the_same_bits(set_to_none: bool, tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    plain_numbers = train(model, optimizer, scheduler, set_to_none=set_to_none)
    plain = everything(model, optimizer)

    model, optimizer, scheduler = made()
    absent: list[int] = []
    with memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)) as session:
        keeper = session._live.parameters
        numbers = train(
            model,
            optimizer,
            scheduler,
            after=lambda: absent.append(keeper.away_bytes - keeper.absent_bytes),
            set_to_none=set_to_none,
        )
        assert keeper.away_bytes > 400 * KIB
    assert numbers == plain_numbers
    assert differing(plain, everything(model, optimizer)) == []
    assert max(absent) <= 128 * KIB  # of parameters and as many gradients
    assert session.measured.bytes_to_tier > 0
    assert session.measured.bytes_from_tier > session.measured.bytes_to_tier
    # Nothing is left of it.
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_what_is_written_through_a_state_dict_is_in_the_weights_whenever_it_is_written(tmp_path: Path) -> None:
    """GIVEN a state dict that is held over an evaluation WHEN its tensors are written to and dropped THEN it counts."""

    def numbers_of(model: GPT, optimizer: torch.optim.Optimizer, scheduler: Any) -> list[float]:
        found = train(model, optimizer, scheduler, num_steps=2)

        def evaluate() -> None:
            with torch.no_grad():
                found.append(loss_of(model, 99).item())

        held = model.state_dict()
        evaluate()
        for value in held.values():
            value.mul_(0.9)
        evaluate()
        del held, value
        evaluate()
        evaluate()
        return found + train(model, optimizer, scheduler, first=2, num_steps=1)

    model, optimizer, scheduler = made()
    plain_numbers = numbers_of(model, optimizer, scheduler)
    plain = everything(model, optimizer)
    model, optimizer, scheduler = made()
    with memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)):
        numbers = numbers_of(model, optimizer, scheduler)
    assert numbers == plain_numbers
    assert differing(plain, everything(model, optimizer)) == []


def test_one_session_after_another_has_the_parameters_on_disk(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    gc.disable()  # nothing may wait for that
    try:
        for first in range(0, 6, 2):
            with memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)) as session:
                train(model, optimizer, scheduler, first=first, num_steps=2)
                assert session._live.parameters.away_bytes > 400 * KIB
    finally:
        gc.enable()


def test_an_optimizer_that_shows_itself_in_its_first_step_is_stepped_in_parts(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    train(model, optimizer, scheduler, num_steps=2)
    plain = everything(model, optimizer)
    model, optimizer, scheduler = made()
    session = Session(plan=plan_for(model), disk=str(tmp_path))
    session.attach(model, None)
    handle = register_optimizer_step_pre_hook(lambda found, *_: session.add_optimizer(found))
    train(model, optimizer, scheduler, num_steps=2)
    handle.remove()
    session.close()
    assert differing(plain, everything(model, optimizer)) == []


# A step that is recorded.


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
            after=lambda: away.append(session._live.parameters.away_bytes),
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
        assert session._live.keeper.is_away
        assert session._live.parameters.absent_bytes > 0


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
            assert session._live.parameters.away_bytes > 0
        else:
            closure()
        optimizer.step(closure)
        if is_under_session:
            assert session._live.parameters.away_bytes == 0
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
        session._live._change_to(session.trace, plan_for(model), model, (optimizer,), is_running=False)
        train(model, optimizer, scheduler, first=2, num_steps=2)
    assert len(opened) == 1
    assert differing(plain, everything(model, optimizer)) == []


# Refused.


def test_parameters_go_only_where_the_optimizers_state_goes_too(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    with (
        memwall.fit(model, optimizer, plan=plan_of(model, PARAMETERS), disk=str(tmp_path)),
        pytest.raises(ApplyError, match="parameters on disk and the optimizer's state in memory"),
    ):
        train(model, optimizer, scheduler)
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_a_model_whose_gradients_are_used_inside_backward_is_refused(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    model.layers[0].up.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    reason = "layers.0.up.weight has a hook that runs when its gradient is accumulated"
    assert why_not_streamed(model, optimizer) == reason
    with (
        memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)),
        pytest.raises(ApplyError, match=f"keeps parameters on the disk, which cannot be done here: {reason}"),
    ):
        train(model, optimizer, scheduler)


def test_a_parameter_that_its_model_uses_itself_stays_and_is_no_reason_for_the_others(
    without_room: None, tmp_path: Path
) -> None:
    """GIVEN positions that are sliced WHEN a first step has left them in memory THEN a plan may have the rest on disk.

    What memwall itself had on them while they were away is gone by then.
    """

    class Sliced(GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            out: Tensor = self.head(self.norm(x))
            return out

    model = Sliced()
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) as session:
        loss = loss_of(model, 0)
        assert type(model.positions.weight) is nn.Parameter
        assert type(model.head.weight) is not nn.Parameter
        loss.backward()
        assert why_not_streamed(model, optimizer) is None
        optimizer.step()
        assert session._live.parameters.away_bytes > 0


def test_an_optimizer_that_mixes_parameters_is_a_reason_too() -> None:
    model = GPT()
    reason = "LBFGS cannot be stepped a few parameters at a time"
    assert why_not_streamed(model, torch.optim.LBFGS(model.parameters())) == reason
    assert why_not_streamed(model, None) is None


def test_a_first_step_that_cannot_have_them_on_disk_says_why(
    without_room: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    model = GPT()
    keeper = ParameterKeeper(str(tmp_path / "none"), None)
    allocator: Any = None
    assert not keeper.spill_recorded(model, None, allocator, budget_bytes=1)
    assert "the first step keeps parameters and gradients in memory" in caplog.text
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}


def test_a_loop_that_keeps_all_parameters_in_memory_ends_with_what_was_expected(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    with memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)):
        loss_of(model, 0)
        held = model.state_dict()
        with pytest.raises(NoEffectError, match=r"parameters on the disk .*KiB are in memory"):
            train(model, optimizer, scheduler)
    assert held


# A step that is done again.


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_step_that_ran_out_of_memory_is_done_again_with_parameters_where_they_are(
    place: str, without_room: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        handles.pop().remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 MiB. GPU 0 has no more")

    def arm(model: GPT) -> None:
        if place == "forward":
            handles.append(model.layers[2].up.register_forward_pre_hook(fail))
        else:
            handles.append(model.layers[2].up.register_full_backward_hook(fail))

    handles: list[Any] = []
    found = []
    for is_planned in (False, True):
        model, optimizer, _ = made()
        session = memwall.fit(model, optimizer, budget=1 << 40, disk=str(tmp_path)) if is_planned else None
        if session is not None:
            session.on_plan = lambda ready, model=model: setattr(ready._live, "plan", plan_for(model))
            monkeypatch.setattr(
                "memwall.apply.live_plan.planned_after",
                lambda trace, settings, plan, _, model=model: (trace, settings, plan_for(model)),
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
            assert session._live.parameters.away_bytes > 400 * KIB
            session.close()
        found.append(everything(model, optimizer))
    assert handles == []
    assert differing(*found) == []
