"""The state of several optimizers is on the next tier between steps, and each steps its own from there."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from combinations import every_pair
from optimizer_runs import KIB, resident_state_bytes, same
from plans import plan_of
from several_optimizers import Optimizers, everything, made, one_each, train
from shown_optimizers import shown_at_first_step
from torch import nn

import memwall
from memwall.apply.optimizer_state.open_state import can_place
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.errors import ApplyError, StoreError
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


def on_disk(resident_bytes: int = 0) -> OptimizerPlacement:
    return OptimizerPlacement(tier="disk", resident_bytes=resident_bytes, bucket_bytes=40 * KIB, min_bytes=KIB)


@pytest.mark.parametrize(
    ("is_known", "adamw_first", "every", "resident_bytes"),
    every_pair(
        {"fit": True, "run": False},
        {"muon adamw": False, "adamw muon": True},
        {"both in each step": 1, "one in every second": 2},
        {"nothing stays": 0, "some stays": 50 * KIB},
    ),
)
def test_the_state_of_both_is_on_disk_between_steps_and_in_memory_afterwards(
    is_known: bool, adamw_first: bool, every: int, resident_bytes: int
) -> None:
    model, optimizers = made(adamw_first=adamw_first)
    train(model, optimizers, every=every)
    plain = everything(model, optimizers)
    model, optimizers = made(adamw_first=adamw_first)
    session = Session(plan=plan_of(model, on_disk(resident_bytes)))
    session.attach(model, optimizers if is_known else None)
    with session, shown_at_first_step(session):
        train(model, optimizers, every=every)
        present_bytes = sum(resident_state_bytes(optimizer) for optimizer in optimizers)
        assert same(everything(model, optimizers), plain)
    assert present_bytes <= resident_bytes
    assert bool(present_bytes) == bool(resident_bytes)
    assert same(everything(model, optimizers), plain)


def test_what_the_state_of_both_takes_of_the_disk_counts_together(tmp_path: Path) -> None:
    _, optimizers = made()
    keeper = StateKeeper(str(tmp_path), None)
    for optimizer in optimizers:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    keeper.place(optimizers, on_disk())
    taken_bytes = keeper.away_bytes
    keeper.bring_back()
    assert not keeper.is_away
    keeper = StateKeeper(str(tmp_path), taken_bytes - 1)
    with pytest.raises(StoreError, match="limit"):
        keeper.place(optimizers, on_disk())
    keeper.bring_back()
    assert all(value.device.type == "cpu" for o in optimizers for s in o.state.values() for value in s.values())


def test_an_optimizer_that_comes_to_one_whose_state_is_on_disk_has_its_own_there_too() -> None:
    def twice() -> tuple[nn.Module, Optimizers]:
        model, _ = made()
        return model, (torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.last.parameters()))

    model, optimizers = twice()
    train(model, optimizers, every=2)
    plain = everything(model, optimizers)
    model, optimizers = twice()
    session = Session(plan=plan_of(model, on_disk()))
    session.attach(model, None)
    with session, shown_at_first_step(session):
        train(model, optimizers, every=2)
        assert [resident_state_bytes(optimizer) for optimizer in optimizers] == [0, 0]
    assert same(everything(model, optimizers), plain)


def test_optimizers_whose_place_another_took_go_on_with_their_state_where_they_step_again() -> None:
    def run(session: Session | None) -> object:
        model, (muon, adamw) = made()
        whole = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if session is not None:
            session.attach(model, None)
        with session or nullcontext(), nullcontext() if session is None else shown_at_first_step(session):
            for chosen in ((muon, adamw), (whole,), (muon, adamw), (whole,)):
                train(model, chosen, num_steps=2)
        return everything(model, (muon, adamw, whole))

    plain = run(None)
    model, _ = made()
    assert same(run(Session(plan=plan_of(model, on_disk()))), plain)


def test_the_state_of_optimizers_that_nobody_holds_any_more_is_given_up() -> None:
    """GIVEN a loop that freezes more in each round WHEN it makes a new optimizer THEN the state of one is on disk."""
    model, _ = made()
    session = Session(plan=plan_of(model, on_disk()))
    session.attach(model, None)
    num_held = []
    with session, shown_at_first_step(session):
        for number in range(3):
            optimizer = torch.optim.AdamW([*model.parameters()][2 * number :], lr=1e-3)
            train(model, (optimizer,), num_steps=2)
            num_held.append(len(session._live.in_effect.keeper._held))
            del optimizer
    assert num_held == [1, 1, 1]


def test_more_optimizers_than_can_be_placed_are_refused_with_their_number() -> None:
    model, _ = made()
    optimizers = list(one_each(model).values())
    with (
        pytest.raises(ApplyError, match=r"13 optimizers step the model \(13 x AdamW\), .* for 8 at most"),
        memwall.fit(model, optimizers, plan=plan_of(model, on_disk())),
    ):
        train(model, optimizers)


def test_state_that_is_sparse_is_known_not_to_move(tmp_path: Path) -> None:
    table = nn.Embedding(1 << 12, 16, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.arange(8)).sum().backward()
    assert can_place(optimizer)
    optimizer.step()
    assert not can_place(optimizer)
    with pytest.raises(ApplyError, match="SGD keeps sparse tensors as its state, which cannot be on disk"):
        StateKeeper(str(tmp_path), None).place([optimizer], on_disk())


@pytest.mark.parametrize("kind", [torch.optim.SparseAdam, torch.optim.Adagrad])
def test_dense_state_of_sparse_gradients_moves(
    kind: type[torch.optim.Optimizer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A table of rows that another test has stepped has put its own around that for good.
    step = kind.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "step", step)

    def run(keeper: StateKeeper | None) -> object:
        torch.manual_seed(0)
        table = nn.Embedding(1 << 12, 16, sparse=True)
        optimizer = kind(table.parameters(), lr=0.1)  # type: ignore[call-arg]
        for step in range(3):
            table(torch.arange(8) + step).square().sum().backward()
            optimizer.step()
            if keeper is not None:
                keeper.place([optimizer], on_disk())
                assert resident_state_bytes(optimizer) == 0
            optimizer.zero_grad()
        return everything(table, [optimizer])

    keeper = StateKeeper(str(tmp_path), None)
    assert same(run(keeper), run(None))
    keeper.close()
