"""A step is recorded again where nothing fitted with the first: a run under a told budget begins with both."""

import pytest
import torch
from torch import nn

import memwall
from memwall.errors import InfeasibleError
from memwall.machine.meter import process_bytes
from memwall.session.recorded_step import RecordedForms

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
