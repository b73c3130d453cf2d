"""Actions prove themselves again: every so many steps, and in the first step of each plan."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from block_models import WIDTH, Block, offload
from plans import plan_of
from proven_models import WritesPastAutograd, assert_same, model_with, trained
from torch import Tensor

from memwall.apply import applied
from memwall.apply.blocks.hidden_state import HiddenState
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.techniques.recompute import Recompute
from memwall.session.live_plan import Revision
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def num_digests(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns how many digests were taken so far."""
    from memwall.apply.blocks import digests
    from memwall.apply.offload import proving

    count = 0
    taken = digests.digest_of

    def counting(tensor: Tensor) -> digests.Digest:
        nonlocal count
        count += 1
        return taken(tensor)

    monkeypatch.setattr(digests, "digest_of", counting)
    monkeypatch.setattr(proving, "digest_of", counting)
    return lambda: count


@pytest.mark.parametrize("action", [Recompute(block="blocks.1"), offload("blocks.1")])
def test_actions_prove_themselves_again_every_so_many_steps(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_digests: Callable[[], int]
) -> None:
    monkeypatch.setattr(applied, "PROOF_STEPS", 3)
    model = model_with(Block)
    optimizer = torch.optim.SGD(model.parameters())
    seen = []
    with Session(plan=plan_of(model, action), disk=str(tmp_path)) as session:
        session.attach(model, optimizer)
        for _ in range(7):
            before = num_digests()
            model(torch.ones(16, WIDTH)).square().mean().backward()
            seen.append(num_digests() > before)
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [True, False, False, True, False, False, True]


def made_again(session: Session, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the next step begin as after one that took more than foreseen, with this plan found to make up for it."""
    revision = Revision(cast(Any, None), plan, session.budget_bytes)
    monkeypatch.setattr(session._live, "revised", lambda **_: revision)
    session._steps.recovery._excess_bytes = 1


@pytest.mark.parametrize("action", [Recompute(block="blocks.1"), offload("blocks.1")])
def test_actions_of_a_plan_that_is_made_again_prove_themselves_in_its_first_step(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_digests: Callable[[], int]
) -> None:
    model = model_with(Block)
    optimizer = torch.optim.SGD(model.parameters())
    seen = []
    with Session(plan=plan_of(model, offload("blocks.0")), disk=str(tmp_path)) as session:
        session.attach(model, optimizer)
        for number in range(5):
            if number == 3:
                made_again(session, plan_of(model, action), monkeypatch)
            before = num_digests()
            model(torch.ones(16, WIDTH)).square().mean().backward()
            seen.append(num_digests() > before)
            optimizer.step()
            optimizer.zero_grad()
    assert session.measured.num_replans == 1
    assert seen == [True, False, False, True, False]


def test_a_block_that_only_a_plan_made_again_treats_is_dropped_in_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_with(WritesPastAutograd)
    expected = trained(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(1)
    found = []
    with Session(plan=plan_of(model, offload("blocks.0")), disk=str(tmp_path)) as session:
        session.attach(model, optimizer)
        for number in range(3):
            if number == 1:
                assert not session.measured.lost
                made_again(session, plan_of(model, offload("blocks.0"), offload("blocks.1")), monkeypatch)
            model(torch.randn(16, WIDTH, generator=generator)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    assert_same(found, expected)
    assert list(session.measured.lost) == [("offload", "blocks.1")]


def test_a_block_that_two_plans_recompute_is_proven_under_the_second_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a block that was proven WHEN it moves on by itself under a plan made again THEN that drops it in time."""

    class Moving(Block):
        def forward(self, x: Tensor) -> Tensor:
            moved.append(0)
            return x + self.outer(torch.tanh(self.inner(x) * (len(moved) if is_moving else 1)))

    def gradients(session: Session | None) -> list[Tensor]:
        nonlocal is_moving
        is_moving, found, model = False, [], model_with(Moving)
        optimizer = torch.optim.AdamW(model.parameters())
        if session is not None:
            session.attach(model, optimizer)
        for number in range(3):
            if number == 2:
                is_moving = True
                moved.clear()
                if session is not None:
                    assert not session.measured.lost
                    made_again(session, plan_of(model, again), monkeypatch)
            model(torch.ones(16, WIDTH)).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        return found

    moved: list[int] = []
    is_moving = False
    again = Recompute(block="blocks.1")
    monkeypatch.setattr(HiddenState, "recalled", lambda state: nullcontext())
    expected = gradients(None)
    with Session(plan=plan_of(model_with(Moving), again)) as session:
        assert_same(gradients(session), expected)
    assert session.measured.num_replans == 1
    assert list(session.measured.lost) == [("recompute", "blocks.1")]


def test_a_block_that_changes_later_is_dropped_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(applied, "PROOF_STEPS", 2)

    class Later(Block):
        num_calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.num_calls += 1
            y = torch.sigmoid(self.inner(x))
            if self.num_calls >= 3:
                y.data.mul_(0.5)
            return x + self.outer(y)

    model = model_with(Later)
    expected = trained(copy.deepcopy(model))
    with Session(plan=plan_of(model, offload("blocks.1")), disk=str(tmp_path)) as session:
        assert_same(trained(model, session), expected)
    assert list(session.measured.lost) == [("offload", "blocks.1")]
