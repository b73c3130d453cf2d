"""The watch for actions without effect concludes nothing from steps that show nothing."""

import copy
import logging
from pathlib import Path

import pytest
import torch
from block_models import PLACED, WIDTH, Model, offload, train
from plans import plan_of
from torch import Tensor

from memwall.planning.action import Action
from memwall.planning.techniques.accumulate import Accumulate
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.session.session import Session

pytestmark = pytest.mark.slow


class Dropping(Model):
    """Leaves blocks out, as layer drop and early exits do."""

    def __init__(self, steps: tuple[tuple[int, ...], ...]) -> None:
        super().__init__(num_blocks=3)
        self.steps, self.number = steps, 0

    def forward(self, x: Tensor) -> Tensor:
        for place in self.steps[min(self.number, len(self.steps) - 1)]:
            x = self.blocks[place](x)
        self.number += 1
        return x


def test_blocks_that_are_left_out_are_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a block that runs from the third step on THEN it is waited for, by name, and then seen."""
    model = Dropping(((0,), (0, 1), (0, 1, 2)))
    actions = [Recompute(block=f"blocks.{place}") for place in range(3)]
    with caplog.at_level(logging.INFO, "memwall"), Session(plan=plan_of(model, *actions)) as session:
        train(session, model, num_steps=4)
        assert session._live.in_effect.applied is not None
        assert session._live.in_effect.applied.effects._open == []
    assert "watched on: recompute of 'blocks.2'" in caplog.text
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_gradients_that_stay_from_an_earlier_step_are_no_sign(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN gradients that are set to zero and not dropped WHEN a block is left out THEN that is no alarm."""
    model = Dropping(((0, 1, 2), (0, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    with Session(plan=plan_of(model, *(Recompute(block=f"blocks.{place}") for place in range(3)))) as session:
        model(torch.ones(8, WIDTH)).sum().backward()
        session.attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(torch.ones(8, WIDTH)).sum().backward()
            optimizer.step()
    assert session.measured.num_steps == 3


def test_an_evaluation_a_frozen_block_and_a_short_batch_say_nothing(tmp_path: Path) -> None:
    """GIVEN steps in which there is nothing to recompute or to move THEN nothing is concluded from them."""
    model = Model()
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    actions = (Recompute(block="blocks.0"), offload("blocks.1"))
    with Session(plan=plan_of(model, *actions), disk=str(tmp_path)) as session:
        session.attach(model, optimizer)
        for num_samples in (1, 1, 8):
            model(torch.ones(num_samples, WIDTH)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(torch.ones(8, WIDTH))
            model(torch.ones(1, WIDTH))  # an evaluation that forgets no_grad
    assert session.measured.num_steps == 3
    assert session.measured.bytes_to_tier > 0


def test_a_short_last_batch_is_no_missing_accumulation() -> None:
    """GIVEN a batch of one micro-batch only WHEN it comes first THEN the next step is waited for."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(plan=plan_of(model, Accumulate(micro_batch=2, num_micro_batches=4))) as session:
        session.attach(model, optimizer)
        for num_samples in (2, 8, 8):
            for micro in session.step(torch.ones(num_samples, WIDTH)):
                session.backward(model(micro).square().mean())
            optimizer.step()
    assert session.measured.num_steps == 3


def test_the_watch_ends_once_everything_was_seen(tmp_path: Path) -> None:
    """GIVEN one action of each kind that work WHEN a step is over THEN no hook of the watch is left."""
    model = Model()
    plain = copy.deepcopy(model)
    actions: list[Action] = [Recompute(block="blocks.0"), offload("blocks.1"), Autocast(dtype="bfloat16"), PLACED]
    if not heap_unavailable_reason():
        actions.append(AllocatorReuse(policy="tensor-heap"))
    with Session(plan=plan_of(model, *actions), disk=str(tmp_path), allow=("precision",)) as session:
        train(session, model, num_steps=1)
        assert session._live.in_effect.applied is not None
        assert session._live.in_effect.applied.effects._open == []
        assert len(model._forward_hooks) == len(plain._forward_hooks)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
