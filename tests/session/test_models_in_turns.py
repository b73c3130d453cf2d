"""Models that have turns of several steps each, as a population has, are each planned from a step of their own."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from memwall.errors import InfeasibleError
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.planfile import Plan
from memwall.session.live_plan import LivePlan
from memwall.session.session import Session
from memwall.trace.records import Trace
from memwall.trace.together import TrainedTogether

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

MIB = 1 << 20
WIDTHS = (256, 320, 384)


def made() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    models: list[nn.Module] = []
    for width in WIDTHS:
        blocks = [nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 64), nn.Tanh()) for _ in range(6)]
        models.append(nn.Sequential(*blocks))
    return models, [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]


def trained(
    models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], after_turn: Callable[[], None] = bool
) -> list[Tensor]:
    """Three rounds, in each of which every model takes two steps and is evaluated."""
    for _ in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            for _ in range(2):
                model(torch.randn(256, 64)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            after_turn()
            with torch.no_grad():
                model(torch.randn(16, 64))
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def called_in(trace: Trace | None) -> set[str]:
    """Returns the names of the models that a recorded step has called."""
    assert trace is not None
    return {trace.modules[call.module].path.partition(".")[0] for call in trace.steps[0].calls}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Holds, of each step that is recorded, the names of the models called in it."""
    found: list[set[str]] = []
    ended = LivePlan.end_recording

    def noted(live: LivePlan) -> None:
        ended(live)
        found.append(called_in(live.trace))

    monkeypatch.setattr(LivePlan, "end_recording", noted)
    return found


def test_each_is_recorded_once_and_its_plan_comes_back_with_its_turn(recorded: list[set[str]]) -> None:
    expected = trained(*made())
    planned_for: list[set[str]] = []
    models, optimizers = made()
    session = Session(budget_bytes=64 << 30)
    session.attach(TrainedTogether(models), optimizers)
    with session:
        found = trained(models, optimizers, lambda: planned_for.append(called_in(session.trace)) if session.plan else 0)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    first, second, third = ({name} for name in ("Sequential", "Sequential#2", "Sequential#3"))
    assert recorded[-3:] == [third, first, second]  # once all have been stepped; in the last round none
    assert planned_for[-3:] == [first, second, third]


def test_plans_of_turns_end_with_the_models_that_they_are_of(recorded: list[set[str]]) -> None:
    """GIVEN models with a plan each WHEN a further one joins them THEN all of them are recorded beside it."""
    models, optimizers = made()
    session = Session(budget_bytes=64 << 30)
    session.attach(TrainedTogether(models[:2]), optimizers[:2])
    with session:
        trained(models[:2], optimizers[:2])
        before = len(recorded)
        session.train_also(TrainedTogether(models))
        session.add_optimizer(optimizers[2])
        trained(models, optimizers)
    names = ("Sequential", "Sequential#2", "Sequential#3")
    assert {name for step in recorded[before:] for name in step} == set(names)
    assert recorded[-3:] == [{names[2]}, {names[0]}, {names[1]}]


def test_the_number_told_has_room_for_what_planning_the_turns_before_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a planning that leaves 32 MiB in the process WHEN two more models are to be planned THEN so often more."""
    models, optimizers = made()
    session = Session(budget_bytes=MIB)
    session.attach(TrainedTogether(models), optimizers)
    needed_bytes: list[int] = []
    left: list[Tensor] = []

    def refused(search: RecordingSearch) -> Plan:
        left[:] = left or [torch.ones(32 * MIB // 4)]
        assert search.settings.first_step is not None
        needed_bytes.append(search.settings.first_step.needed_bytes)
        raise InfeasibleError("nothing fits", budget_bytes=MIB, smallest_feasible_bytes=2 * MIB)

    monkeypatch.setattr("memwall.session.first_plan.found_by", refused)
    with pytest.raises(InfeasibleError) as error, session:
        trained(models, optimizers)
    assert error.value.smallest_feasible_bytes > needed_bytes[0] + 2 * 32 * MIB
