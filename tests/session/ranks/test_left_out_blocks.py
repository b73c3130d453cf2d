"""Ranks that leave blocks out at random, each other ones, are planned for all of them, and train as plain DDP does."""

from pathlib import Path
from typing import Any

import pytest
from rank_runs import found_by_ranks

SCRIPT = """
import contextlib
import hashlib
import memwall

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(256, 2048), nn.Linear(2048, 256)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.inner(x)))

class Net(nn.Module):
    "Leaves each block out with a chance that grows with its depth, as stochastic depth does."

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(256, 256)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            if torch.rand(()) > (number + 1) / 8:
                x = block(x)
        return self.head(x)

def trained(**fit):
    "Returns a hash of the weights, and the session if there is one."
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(10 + rank)
    with memwall.fit(model, optimizer, **fit) if fit else contextlib.nullcontext() as session:
        for _ in range(6):
            model(torch.randn(512, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest(), session

if BUDGET is None:
    found(digest=trained()[0])
try:
    digest, session = trained(budget=BUDGET)
except memwall.InfeasibleError as error:
    found(told=error.smallest_feasible_bytes)
found(digest=digest, peak=session.measured.peak_bytes, actions=len(session.plan.actions))
"""


def found_at(budget: int | None, folder: Path) -> list[dict[str, Any]]:
    return found_by_ranks(2, f"BUDGET = {budget}\n{SCRIPT}", folder)


@pytest.mark.slow(seconds=30)
def test_ranks_hold_at_the_budget_that_is_told_and_train_as_plain_ones(tmp_path: Path) -> None:
    """GIVEN a model of stochastic depth on two ranks, and a budget that no plan keeps to
    WHEN they are given the one that the refusal tells
    THEN no step passes it, whichever blocks run, and the weights are those of plain DDP, bit for bit.
    """
    plain = found_at(None, tmp_path)
    told = {of_rank["told"] for of_rank in found_at(64 << 20, tmp_path)}
    assert len(told) == 1
    for of_rank in found_at(told_bytes := told.pop(), tmp_path):
        assert of_rank["digest"] == plain[0]["digest"] == plain[1]["digest"]
        assert of_rank["peak"] <= told_bytes
        assert of_rank["actions"] > 0
