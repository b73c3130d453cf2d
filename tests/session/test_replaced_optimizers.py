"""A new optimizer takes the place of one whose state is on disk: the same bits, and nothing left of what is dropped."""

import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from optimizer_runs import KIB, Net, same
from plans import plan_of
from shown_optimizers import shown_at_first_step
from torch import nn

from memwall.errors import StoreError
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def everything(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> object:
    return [model.state_dict(), *(optimizer.state_dict() for optimizer in optimizers)]


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["aabb", "aabbac", "abab"])
@pytest.mark.parametrize("others", [torch.optim.AdamW, torch.optim.NAdam], ids=["of one class", "of two"])
def test_an_optimizer_that_takes_the_place_of_one_whose_state_is_on_disk_trains_to_the_same_bits(
    turns: str, others: type[torch.optim.Optimizer]
) -> None:
    """GIVEN a plan with state on disk WHEN a loop goes on with a new optimizer THEN each finds its own state there."""

    def train_in_turns(model: nn.Module) -> list[torch.optim.Optimizer]:
        by_name: dict[str, torch.optim.Optimizer] = {"a": torch.optim.AdamW(model.parameters(), lr=1e-2)}
        for step, name in enumerate(turns):
            optimizer = by_name.setdefault(name, others(model.parameters(), lr=1e-3))  # type: ignore[call-arg]
            model(torch.ones(5, 32), step).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*by_name.values()]

    model = made()
    plain = everything(model, train_in_turns(model))
    model = made()
    plan = plan_of(model, OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB))
    session = Session(plan=plan)
    session.attach(model, None)
    with session, shown_at_first_step(session):
        optimizers = train_in_turns(model)
        assert session._live.in_effect.keeper.away_bytes > 0
    assert same(everything(model, optimizers), plain)
    assert session.measured.num_steps == len(turns)


def in_epochs(
    session: Session, model: nn.Module, classes: Sequence[type[torch.optim.Optimizer]], *, holds: list[object] | None
) -> Iterator[torch.optim.Optimizer]:
    """Trains with a new optimizer in every second step, yields each after its steps, and drops it or holds it."""
    with session, shown_at_first_step(session):
        for each in classes:
            optimizer = each(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
            for step in range(2):
                model(torch.ones(5, 32), step).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if holds is not None:
                holds.append(optimizer)
            yield optimizer
            del optimizer


def on_disk(**limits: int) -> tuple[nn.Module, Session]:
    model = made()
    plan = plan_of(model, OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB))
    session = Session(plan=plan, **limits)  # type: ignore[arg-type]
    session.attach(model, None)
    return model, session


def open_scratch_bytes() -> list[int]:
    """The size of each file without a name that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return [link.stat().st_size for link in links if "(deleted)" in os.readlink(link)]


@pytest.mark.parametrize("others", [torch.optim.AdamW, torch.optim.NAdam], ids=["of one class", "of two"])
def test_an_optimizer_that_was_replaced_and_dropped_is_gone_with_its_file(others: type[torch.optim.Optimizer]) -> None:
    """GIVEN a disk with room for one and a half WHEN each epoch has a new optimizer THEN the ones before are gone."""
    model, session = on_disk(disk_capacity_bytes=240 * KIB)
    before, made_so_far, sizes, undos = len(open_scratch_bytes()), [], [], []
    for optimizer in in_epochs(session, model, [torch.optim.AdamW, others] * 3, holds=None):
        made_so_far.append(weakref.ref(optimizer))
        del optimizer
        applied = session._live.in_effect.applied
        assert applied is not None
        sizes.append(len(open_scratch_bytes()) - before)
        undos.append(len(applied._undo))
        assert [one() is not None for one in made_so_far] == [False] * (len(made_so_far) - 1) + [True]
    assert sizes == [1] * 6
    assert undos == undos[:1] * 6
    assert session.measured.num_steps == 12


def test_optimizers_that_were_replaced_and_are_held_share_the_limit_of_the_disk() -> None:
    model, session = on_disk(disk_capacity_bytes=240 * KIB)
    held: list[object] = []
    with pytest.raises(StoreError, match="optimizers that this one has replaced and the script still holds"):
        list(in_epochs(session, model, [torch.optim.AdamW] * 3, holds=held))
    assert len(held) == 1


@pytest.mark.slow
def test_optimizers_that_take_turns_are_undone_once() -> None:
    model, session = on_disk()
    first, second = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    undos = []
    with session, shown_at_first_step(session):
        for step in range(8):
            model(torch.ones(5, 32), step).square().mean().backward()
            (first, second)[step % 2].step()
            applied = session._live.in_effect.applied
            assert applied is not None
            undos.append(len(applied._undo))
    assert undos == undos[:1] * 8


@pytest.mark.parametrize(
    ("options", "holds", "num_recorded"),
    [({}, False, 1), ({"momentum": 0.5}, False, 2), ({}, True, 4)],
    ids=["as it was", "with state", "beside those before"],
)
def test_a_new_optimizer_for_each_round_has_its_steps_recorded_only_where_they_need_more(
    options: dict[str, float], holds: bool, num_recorded: int
) -> None:
    """GIVEN a plan WHEN each round makes an optimizer THEN the plan stays, unless more is held than it knows of."""
    model, states, made_so_far, held = made(), [], [], []
    session = Session(budget_bytes=8 << 30)
    session.attach(model, None)
    with session, shown_at_first_step(session):
        for number in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / (1 + number), **(options if number else {}))
            made_so_far.append(weakref.ref(optimizer))
            held.append(optimizer if holds else None)
            for step in range(3):
                loss = model(torch.ones(5, 32), step).square().mean()
                states.append(session.state)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    assert states.count("recording") == num_recorded
    assert sum(one() is not None for one in made_so_far) == (4 if holds else 1)
