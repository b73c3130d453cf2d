"""DistributedDataParallel makes its buckets anew in the second forward; the old ones leave the process then."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memwall
from memwall.apply.memory.allocator import AllocatorHandler


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank")
def test_free_memory_is_returned_once_when_buckets_were_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a plan made before the second forward WHEN that makes new buckets THEN the old ones' memory is returned."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[tuple[int, bool]] = []
    steps: list[int] = []
    trim = AllocatorHandler.trim

    def noted(handler: AllocatorHandler, *, generation: int = 2) -> None:
        seen.append((len(steps), model._has_rebuilt_buckets))
        trim(handler, generation=generation)

    monkeypatch.setattr(AllocatorHandler, "trim", noted)
    with memwall.fit(model, optimizer, budget="20GiB"):
        for step in range(4):
            steps.append(step)
            model(torch.ones(4, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [found for found in seen if found[1]] == [(2, True)]  # in the second step
    assert not model.module._forward_pre_hooks
