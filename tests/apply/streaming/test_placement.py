"""Parameters on disk as a plan's action: applied and taken back by a session, the same bits, refused where need be."""

import gc
import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from placed_runs import BLOCKS, PARAMETERS, STATE, differing, made, plan_for, train
from plans import plan_of
from streamed_models import GPT, KIB, everything, loss_of
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memwall
from memwall.apply.streaming.open_streaming import why_not_streamed
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.errors import ApplyError, NoEffectError
from memwall.planning.planfile import Plan
from memwall.session.live_plan import Revision
from memwall.session.session import Session

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread"), pytest.mark.slow]


@pytest.fixture(params=[True, False], ids=["gradients dropped", "gradients zeroed"])
def set_to_none(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


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
            keeper = session._live.in_effect.parameters
            assert keeper.num_spilled > 4
            assert (keeper.away_bytes == 0) == (len(stays) > 2)
            present = [member.name for member in keeper._streaming.tier if member.values.is_here]
            if stays:
                assert any(name.startswith("layers.1.") for name in present)
        assert numbers == plain_numbers
        assert differing(plain, everything(model, optimizer)) == []
        moved[stays] = session.measured.bytes_from_tier
    assert moved[staying] < 0.8 * moved[()]


def test_state_may_stay_in_part_where_all_parameters_leave(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    plain_numbers = train(model, optimizer, scheduler)
    plain = everything(model, optimizer)
    away: list[int] = []
    for resident_bytes in (0, 100 * KIB):
        model, optimizer, scheduler = made()
        state = msgspec.structs.replace(STATE, resident_bytes=resident_bytes)
        with memwall.fit(model, optimizer, plan=plan_of(model, PARAMETERS, state), disk=str(tmp_path)) as session:
            numbers = train(model, optimizer, scheduler)
            assert session._live.in_effect.parameters.away_bytes > 0
            away.append(session._live.in_effect.keeper.away_bytes)
        assert numbers == plain_numbers
        assert differing(plain, everything(model, optimizer)) == []
    assert 0 < away[1] < away[0]


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
            away.append(session._live.in_effect.parameters.away_bytes)
            session._live.change_to(Revision(session.trace, plan_with(*staying), session.budget_bytes))  # type: ignore[arg-type]
            train(model, optimizer, scheduler, first=first, num_steps=2)
        away.append(session._live.in_effect.parameters.away_bytes)
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
        keeper = session._live.in_effect.parameters
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
                assert session._live.in_effect.parameters.away_bytes > 400 * KIB
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


# Refused.


def test_parameters_go_only_where_the_optimizers_state_goes_too(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    with (
        memwall.fit(model, optimizer, plan=plan_of(model, PARAMETERS), disk=str(tmp_path)),
        pytest.raises(ApplyError, match="parameters on the disk and the optimizer's state in memory"),
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
        assert session._live.in_effect.parameters.away_bytes > 0


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


def test_numpy_arrays_of_parameters_are_named_as_the_cause_with_the_way_out(tmp_path: Path) -> None:
    model, optimizer, scheduler = made()
    arrays = [parameter.detach().numpy() for parameter in model.parameters()]
    with (
        pytest.raises(NoEffectError, match=r"numpy arrays that share memory with them .*: keep a copy instead"),
        memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)),
    ):
        train(model, optimizer, scheduler)
    assert arrays
