"""Sessions of models that were built on disk: the first step takes the parameters over, to the same bits."""

import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_of
from streamed_models import GPT, KIB, everything, large, loss_of, on_disk
from torch import nn

from memwall.apply.streaming import building as parameter_building
from memwall.apply.streaming import parameter_keeper
from memwall.errors import ApplyError
from memwall.machine.meter import process_bytes
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.predict.first_step import FirstStep
from memwall.session import live_plan
from memwall.session.session import Session
from memwall.trace.records import Trace

pytestmark = [pytest.mark.leaves_changed, pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
WINDOW_BYTES = 32 * KIB


@pytest.fixture
def open_sessions() -> Iterator[list[Session]]:
    made: list[Session] = []
    yield made
    for session in made:
        session.close(completed=False)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model is small here, and so is what counts as large."""
    monkeypatch.setattr(parameter_keeper, "MIN_PARAMETER_BYTES", 4 * KIB)
    monkeypatch.setattr(parameter_keeper, "parameter_window_bytes", lambda _: WINDOW_BYTES)
    monkeypatch.setattr(parameter_building, "process_bytes", lambda: 1 << 50)


PLACEMENTS = (
    ParameterPlacement(
        tier="disk",
        blocks=tuple(f"layers.{number}" for number in range(4)),
        window_bytes=WINDOW_BYTES,
        min_bytes=4 * KIB,
        written_bytes=0,
        saved_bytes=1,
    ),
    OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=4 * KIB),
)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session | None = None) -> dict[str, Any]:
    """Some steps; what torch.save writes after each, and what is left."""
    files = []
    for step in range(3):
        loss_of(model, step).backward()
        if session is not None:
            session.add_optimizer(optimizer)
        optimizer.step()
        optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        files.append(file)
    saved = [torch.load(io.BytesIO(file.getvalue())) for file in files]
    found = {f"{number}.{name}": tensor for number, one in enumerate(saved) for name, tensor in one.items()}
    return found | everything(model, optimizer)


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["given plan", "recorded", "recorded, with room after all"])
def test_a_model_built_on_disk_trains_and_is_saved_like_a_plain_one(
    kind: str, tiny: None, request: pytest.FixtureRequest, tmp_path: Path, open_sessions: list[Session]
) -> None:
    plain = trained(*made())
    if kind == "recorded":
        request.getfixturevalue("without_room")
    settings: dict[str, Any] = {"budget_bytes": 1 << 40}
    if kind == "given plan":
        plan = plan_of(GPT(), *PLACEMENTS)
        settings = {"plan": plan}
    session = Session(disk=str(tmp_path), **settings)
    open_sessions.append(session)
    if kind == "given plan":
        session._live.in_effect.watch_building(plan, 1 << 40)
    else:
        session.watch_building()
    model, optimizer = made()
    assert large(model) - on_disk(model) <= {"norm.weight", "layers.3.down.weight", "layers.3.up.weight"}
    session.attach(model, None)
    found = trained(model, optimizer, session)
    session.close()
    assert on_disk(model) == set()
    assert list(tmp_path.iterdir()) == []
    assert found.keys() == plain.keys()
    assert [name for name, value in plain.items() if not torch.equal(found[name], value)] == []


@pytest.mark.slow
def test_another_model_that_was_built_on_disk_is_told_apart_from_the_process(
    tiny: None,
    without_room: None,
    tmp_path: Path,
    open_sessions: list[Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """GIVEN a frozen copy as a teacher THEN the step that is recorded knows what of it would be in memory elsewhere."""
    found: list[tuple[FirstStep, Trace, int]] = []

    def noted(first: FirstStep, trace: Trace) -> FirstStep:
        found.append((first, trace, process_bytes()))
        return first

    monkeypatch.setattr(live_plan, "with_loaders", noted)
    session = Session(disk=str(tmp_path), budget_bytes=1 << 40)
    open_sessions.append(session)
    session.watch_building()
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    session.attach(model, optimizer)
    for _ in range(2):
        data = torch.randn(8, 1024)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(data), teacher(data)).backward()
        optimizer.step()
    (first, trace, held_bytes), *_ = found
    assert 3 * (4 << 20) <= first.others_bytes <= sum(parameter.nbytes for parameter in teacher.parameters())
    assert first.built_from_bytes > 4 * (4 << 20)
    # Its layers are the step's inputs; the process before the step lacks neither these nor the model's own.
    assert trace.base_bytes >= held_bytes - (4 << 20)


@pytest.mark.slow
def test_a_state_dict_of_a_model_on_disk_takes_no_memory_until_a_step_needs_it(
    tiny: None, tmp_path: Path, open_sessions: list[Session]
) -> None:
    session = Session(disk=str(tmp_path), plan=plan_of(GPT(), *PLACEMENTS))
    open_sessions.append(session)
    model, optimizer = made()
    session.attach(model, optimizer)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    parameters = session._live.in_effect.parameters
    absent_bytes = parameters.absent_bytes
    assert absent_bytes > 0.9 * parameters.away_bytes
    kept = model.state_dict()
    before = {name: tensor.clone() for name, tensor in kept.items()}
    assert parameters.absent_bytes == absent_bytes
    # It is of the parameters, not of a copy: what is written there is theirs, and their next step is seen.
    kept["layers.0.up.weight"].zero_()
    assert not model.get_parameter("layers.0.up.weight").any()
    loss_of(model, 1).backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(kept[name], parameter.detach())
        assert name == "layers.0.up.weight" or not torch.equal(kept[name], before[name])
    session.close()


@pytest.mark.parametrize("limit_bytes", [1 << 21, 1 << 40], ids=["no room here", "room above the budget"])
@pytest.mark.parametrize("kind", ["a hook", "an optimizer of all at once"])
def test_what_keeps_them_from_being_on_disk_is_refused_where_the_machine_has_no_room(
    kind: str,
    limit_bytes: int,
    tiny: None,
    without_room: None,
    tmp_path: Path,
    open_sessions: list[Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameter_keeper, "memory_limit_bytes", lambda: limit_bytes)
    session = Session(disk=str(tmp_path), budget_bytes=1 << 20)
    open_sessions.append(session)
    session.watch_building()
    model, optimizer = made()
    if kind == "a hook":
        model.get_parameter("layers.1.up.weight").register_post_accumulate_grad_hook(lambda _: None)
        reason = r"layers\.1\.up\.weight has a hook that runs when its gradient is accumulated"
    else:
        optimizer, reason = torch.optim.LBFGS(model.parameters()), "LBFGS cannot be stepped a few parameters at a time"
    session.attach(model, optimizer)
    if limit_bytes == 1 << 40:  # the step is recorded, and the refusal after it has a number
        loss_of(model, 0)
        assert not on_disk(model)
        return
    expected = (
        rf"parameters went to disk while the script built them, since 1\.0 MiB have no room for them, and cannot stay "
        rf"there: {reason}; give a budget above [0-9.]+ MiB"
    )
    with pytest.raises(ApplyError, match=expected):
        loss_of(model, 0)
