"""A step is recorded again where nothing fitted with the first: a run under a told budget begins with both."""

import pytest
import torch
from torch import nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.meter import process_bytes
from memwall.session.recorded_forms import RecordedForms
from memwall.session.session import Session
from memwall.trace.together import TrainedTogether

pytestmark = pytest.mark.slow

LARGE, SMALL = 30_000, 10


def test_a_refusal_counts_every_step_that_was_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a technique that has a smaller step recorded anew WHEN nothing fits then either THEN the told budget has
    room for the first, larger one."""
    is_changed = iter([True, False])
    monkeypatch.setattr(RecordedForms, "change", lambda *_, **__: next(is_changed))
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held: list[int] = []

    def train() -> None:
        with memwall.fit(model, optimizer, budget="10MiB"):
            for rows in (LARGE, SMALL, SMALL):
                loss = model(torch.ones(rows, 256)).square()
                held.append(process_bytes())
                loss.sum().backward()
                del loss
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(InfeasibleError) as refused:
        train()
    assert len(held) == 2
    assert held[0] > held[1] + (20 << 20)
    assert refused.value.smallest_feasible_bytes >= held[0]


def test_a_refusal_after_more_models_says_what_each_further_one_takes() -> None:
    """GIVEN a loop that keeps each model that it has trained WHEN the next has no room THEN its bytes are told."""
    first, second = (nn.Linear(512, 512, bias=False) for _ in range(2))  # 1 MiB, as are gradient and each moment
    optimizers = [torch.optim.Adam(model.parameters()) for model in (first, second)]
    session = Session(budget_bytes=1 << 40)
    session.attach(first, optimizers[0])

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(2):
            model(torch.ones(2, 512)).sum().backward()
            optimizer.step()

    def train_both() -> None:
        with session:
            train(first, optimizers[0])
            session.train_also(TrainedTogether((first, second)))
            session.add_optimizer(optimizers[1])
            session._live.lower_budget(1)
            train(second, optimizers[1])

    with pytest.raises(InfeasibleError, match=r"the last one takes some 4\.1 MiB more"):
        train_both()
