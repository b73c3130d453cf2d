"""Ranks with unlike numbers of batches, in the context that DistributedDataParallel has for them."""

from pathlib import Path

import pytest
from rank_runs import found_by_ranks

pytestmark = pytest.mark.slow(seconds=20)

SCRIPT = """
import memwall
from torch.nn.parallel import DistributedDataParallel

def trained(context, num_batches):
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64))
                                                   for _ in range(3))))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with context(model, optimizer):
        for epoch in range(2):
            try:
                with model.join(throw_on_early_termination=num_batches is None):
                    for step in range(num_batches or 2 + rank):
                        torch.manual_seed(10 * epoch + step + 100 * rank)
                        loss = model(torch.randn(256, 64)).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
            except RuntimeError as error:
                assert "exhausted all inputs" in str(error) or "Detected at least one rank" in str(error), error
    return [float(p.detach().double().sum()) for p in model.parameters()]

from contextlib import nullcontext
sessions = []
def plain(model, optimizer):
    return nullcontext()
def fitted(model, optimizer):
    sessions.append(memwall.fit(model, optimizer, budget="8GiB"))
    return sessions[-1]
counts = {"more": 1 + 3 * rank, "one each": 1, "even": 3, "thrown": None}
found(
    plain={name: trained(plain, count) for name, count in counts.items()},
    planned={name: trained(fitted, count) for name, count in counts.items()},
    steps=[session.measured.num_steps for session in sessions],
)
"""


def test_ranks_with_fewer_batches_are_not_waited_for(tmp_path: Path) -> None:
    """GIVEN a rank whose first batch is its last of an epoch THEN all of them train on, to the bits of plain torch."""
    found = found_by_ranks(2, SCRIPT, tmp_path)
    for rank, one in enumerate(found):
        assert one["planned"] == one["plain"]
        assert one["steps"][:3] == [2 * (1 + 3 * rank), 2, 6]
