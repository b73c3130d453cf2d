"""Models that a plan treats as blocks as a whole are wrapped from within a call of one of them, which counts too."""

import pytest
import torch
from plans import a_plan
from torch import nn

from memwall.planning.techniques.recompute import Recompute
from memwall.session.session import Session
from memwall.trace.together import TrainedTogether

BLOCKS = "Sequential", "Sequential#2"


@pytest.fixture
def recomputes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans that both of two models are recomputed, whatever the budget."""
    plan = a_plan(*(Recompute(block=block) for block in BLOCKS))
    monkeypatch.setattr("memwall.session.live_plan.planned", lambda trace, *_, **__: (trace, plan))


def test_the_call_from_which_a_plan_is_applied_runs_under_it(recomputes_all: None) -> None:
    """GIVEN an encoder and a decoder, each a block WHEN the encoder's call applies the plan THEN it is recomputed."""
    models = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    optimizer = torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
    session = Session(budget_bytes=1 << 40)
    session.attach(TrainedTogether(list(models)), [optimizer])
    seen = []
    with session:
        for _ in range(3):
            models[1](models[0](torch.ones(2, 4))).sum().backward()
            if (applied := session._live.in_effect.applied) is not None:
                seen.append([applied.blocks.wrapped(block)[1].num_reruns for block in BLOCKS])
            optimizer.step()
            optimizer.zero_grad()
    assert seen == [[1, 1], [2, 2]]
