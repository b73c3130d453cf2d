"""The first step of a run on a CUDA device is recorded, and leaves the heap of CPU tensors as it is."""

import pytest
import torch
from torch import nn

import memwall
from memwall.patches import active

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_the_budget_of_a_device_does_not_steer_the_heap_of_cpu_tensors() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="50%") as session:
        for _ in range(2):
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            assert not any("malloc" in change.where or "mallopt" in change.where for change in active())
            optimizer.step()
            optimizer.zero_grad()
    assert session.plan is not None
    assert session.measured.num_steps == 2
