"""Several optimizers step one model, as Muon its matrices and AdamW the rest: one step, one forecast, the same bits."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from combinations import every_pair, every_value
from optimizer_runs import same
from plans import plan_of
from several_optimizers import Optimizers, everything, made, one_each, train
from shown_optimizers import shown_at_first_step
from torch import nn

import memwall
from memwall.errors import InfeasibleError, UsageError
from memwall.machine.meter import process_bytes
from memwall.planning.planfile import Plan
from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session
from memwall.session.step_borders import StepBorders

pytestmark = pytest.mark.usefixtures("one_thread")

MIB = 1 << 20


def state_bytes(optimizers: Optimizers) -> int:
    """Of matrices and vectors: step counters are made without an operation that a recorder sees."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    return sum(v.nbytes for state in states for v in state.values() if v.dim() > 0)


# Bits.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_known", "adamw_first", "every"),
    every_pair(
        {"fit": True, "run": False},
        {"muon adamw": False, "adamw muon": True},
        {"both in each step": 1, "one in every second": 2},
    ),
)
def test_a_session_ends_with_the_bits_of_the_plain_run(is_known: bool, adamw_first: bool, every: int) -> None:
    model, optimizers = made(adamw_first=adamw_first)
    train(model, optimizers, every=every)
    plain = everything(model, optimizers)
    model, optimizers = made(adamw_first=adamw_first)
    session = Session(budget_bytes=1 << 40)
    session.attach(model, optimizers if is_known else None)
    with session, shown_at_first_step(session):
        train(model, optimizers, every=every)
    assert same(everything(model, optimizers), plain)
    assert session.measured.num_steps == 4


@pytest.mark.slow
def test_a_plan_that_recomputes_ends_with_the_bits_of_the_plain_run() -> None:
    model, optimizers = made()
    train(model, optimizers)
    plain = everything(model, optimizers)
    model, optimizers = made()
    plan = plan_of(model, *(Recompute(block=f"middle.{number}") for number in range(3)))
    with memwall.fit(model, optimizers, plan=plan):
        train(model, optimizers)
    assert same(everything(model, optimizers), plain)


# Where a step begins and ends.


class Heard:
    """What a listener is told, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        def note(*args: object, **kwargs: object) -> None:
            self.calls.append(name if not kwargs else f"{name} {kwargs}")

        return note


FIRST, FURTHER = "optimizer_stepped {'is_first': True}", "optimizer_stepped {'is_first': False}"


@pytest.fixture
def followed() -> Iterator[tuple[Heard, StepBorders, nn.Module, Optimizers]]:
    model = nn.Linear(4, 2)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    heard = Heard()
    borders = StepBorders(heard)  # type: ignore[arg-type]
    borders.attach(model, optimizers)
    yield heard, borders, model, optimizers
    borders.detach()


Followed = tuple[Heard, StepBorders, nn.Module, Optimizers]


@pytest.mark.parametrize("order", [1, -1])
def test_a_step_goes_on_until_the_forward_after_the_last_optimizer(followed: Followed, order: int) -> None:
    heard, borders, model, optimizers = followed
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        for optimizer in optimizers[::order]:
            optimizer.step()
            optimizer.zero_grad()
            assert not borders.in_step
    assert heard.calls == ["before_forward", "step_begins", FIRST, FURTHER] * 2
    assert [one() for one in borders.stepped] == list(optimizers[::order])


def test_what_steps_after_an_evaluation_belongs_to_no_step(followed: Followed) -> None:
    heard, _, model, (first, second) = followed
    second.step()  # nor does what steps before there is one
    model(torch.ones(3, 4)).sum().backward()
    first.step()
    with torch.no_grad():
        model(torch.ones(3, 4))
    second.step()
    assert heard.calls == ["before_forward", "step_begins", FIRST, "before_forward", "evaluation_begins"]


def test_memory_that_runs_out_in_the_second_optimizer_ran_out_in_an_optimizer_step(followed: Followed) -> None:
    _, borders, model, (first, second) = followed
    phases = []
    second.register_step_pre_hook(lambda *_: phases.append(borders.phase))
    model(torch.ones(3, 4)).sum().backward()
    first.step()
    second.step()
    assert phases == ["optimizer step"]
    assert borders.phase == "between steps"


# What is foreseen and what is measured.


class Hungry(torch.optim.SGD):
    """Needs 64 MiB in each of its steps."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        torch.ones(16 * MIB).sum()
        super().step()


@pytest.mark.slow
def test_what_the_second_optimizer_needs_is_in_the_forecast_and_in_the_measurement() -> None:
    model, (muon, adamw) = made()
    hungry = Hungry(adamw.param_groups[0]["params"], lr=1e-2)
    with memwall.fit(model, [muon, hungry], budget=1 << 40) as session:
        train(model, [muon, hungry])
    assert session.plan is not None
    forecast = session.plan.forecast
    assert session.trace.optimizer == "Muon + Hungry"
    assert session.measured.peak_bytes >= session.measured.base_bytes + 64 * MIB
    assert forecast.peak.process_bytes >= session.trace.base_bytes + 64 * MIB
    assert len(session.measured.step_seconds) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("is_known", "every"), every_value({"fit": True, "run": False}, [1, 2]))
def test_the_state_of_both_stands_in_the_step_that_is_planned(is_known: bool, every: int) -> None:
    """GIVEN an optimizer that first steps under a plan WHEN the next step begins THEN that is recorded anew."""
    model, optimizers = made()
    session = Session(budget_bytes=1 << 40)
    session.attach(model, optimizers if is_known else None)
    plans: list[Plan] = []
    session.on_plan = lambda session: plans.append(session.plan)
    with session, shown_at_first_step(session):
        train(model, optimizers, every=every)
    state = [s.nbytes for s in session.trace.steps[0].storages if s.category == "optimizer_state"]
    assert sum(n for n in state if n > 4) == state_bytes(optimizers)
    assert session.trace.optimizer == "Muon + AdamW"
    assert len(plans) == every


# A first step without room.


@pytest.mark.slow
@pytest.mark.parametrize("is_known", [True, False], ids=["fit", "run"])
def test_a_first_step_without_room_has_the_state_of_both_on_disk_and_parameters_back(
    is_known: bool, without_room: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a first optimizer that leaves gradients to another WHEN there is no room THEN both step in parts."""
    monkeypatch.setattr("memwall.apply.optimizer_state.state_keeper.lacks_room", lambda *_: True)
    model, optimizers = made()
    train(model, optimizers, num_steps=2)
    plain = everything(model, optimizers)
    model, optimizers = made()
    session = Session(budget_bytes=1 << 40, disk=str(tmp_path))
    session.attach(model, optimizers if is_known else None)
    standing, in_forward, at_end = session._live.in_effect, [], []
    model.last.register_forward_hook(lambda *_: in_forward.append(standing.parameters.away_bytes > 0))
    optimizers[1].register_step_post_hook(
        lambda *_: at_end.append((standing.keeper.is_away, standing.parameters.away_bytes))
    )
    with session, shown_at_first_step(session):
        train(model, optimizers, num_steps=2)
    assert same(everything(model, optimizers), plain)
    assert in_forward[0] == (not is_known)
    assert at_end == [(True, 0), (False, 0)]


# Optimizers of single parameters, which hooks step within the backward.


def train_in_backward(model: nn.Module, optimizers: dict[nn.Parameter, torch.optim.Optimizer]) -> None:
    """Three steps; each gradient is let go as soon as it was used."""

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in model.parameters()]
    for _ in range(3):
        model(torch.ones(5, 32), 0).square().mean().backward()
    for hook in hooks:
        hook.remove()


def test_optimizers_within_the_backward_keep_their_state_in_memory_without_room(
    without_room: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN gradients that are still to come WHEN the first optimizer steps THEN it is not taken for the only one."""
    monkeypatch.setattr("memwall.apply.optimizer_state.state_keeper.lacks_room", lambda *_: True)
    model, _ = made()
    train_in_backward(model, optimizers := one_each(model))
    plain = everything(model, [*optimizers.values()])
    model, _ = made()
    optimizers = one_each(model)
    session = Session(budget_bytes=1 << 40, disk=str(tmp_path))
    session.attach(model, None)
    with session, shown_at_first_step(session):
        train_in_backward(model, optimizers)
    assert same(everything(model, [*optimizers.values()]), plain)


def test_room_is_left_once_the_last_of_them_has_stepped(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = made()
    optimizers, num_stepped, left = one_each(model), [0], []
    for optimizer in optimizers.values():
        optimizer.register_step_post_hook(lambda *_: num_stepped.__setitem__(0, num_stepped[0] + 1))
    session = Session(budget_bytes=1 << 40)
    session.attach(model, [*optimizers.values()])
    monkeypatch.setattr(session._live.in_effect, "leave_room", lambda _: left.append(num_stepped[0]))
    with session:
        train_in_backward(model, optimizers)
    num_optimizers = len(optimizers)
    assert {number * num_optimizers for number in (1, 2, 3)} <= set(left)


@pytest.mark.slow
def test_the_smallest_budget_has_room_for_a_digest_of_all_weights_where_a_step_has_none() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(16)))
    parameters = list(model.parameters())
    optimizers = {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in parameters}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)
    held_bytes = process_bytes()
    said = "two copies of them are in that; a script that makes none needs"
    with memwall.fit(model, [*optimizers.values()], budget=64 * MIB):
        model(torch.ones(4, 512)).square().mean().backward()
        with pytest.raises(InfeasibleError, match=said) as told:
            model(torch.ones(4, 512))
    assert told.value.smallest_feasible_bytes >= held_bytes + (2 + 2) * 16 * MIB  # moments and copies


# What fit takes.


def test_fit_takes_optimizers_of_this_model_only() -> None:
    model, optimizers = made()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(UsageError, match="fit was given a SGD that trains no parameter of Net; give each model"):
        memwall.fit(model, [*optimizers, other], budget="8GiB")
    with pytest.raises(UsageError, match="fit was given no optimizer"):
        memwall.fit(model, [], budget="8GiB")
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda _: 1.0)
    with pytest.raises(UsageError, match=r"fit was given a LambdaLR; expected a torch\.optim\.Optimizer"):
        memwall.fit(model, [schedule], budget="8GiB")  # type: ignore[list-item]
