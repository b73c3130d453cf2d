"""Two ranks plan and end together."""

import math
from pathlib import Path

import pytest
from rank_runs import found_by_ranks

pytestmark = pytest.mark.slow(seconds=20)

SCRIPT = """
import memwall
from memwall.apply.applied import AppliedPlan
from memwall.errors import MemwallError, StoreError
from block_models import offload
from plans import plan_of
from memwall.planning.techniques.recompute import Recompute
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

def of_shards(model):
    return plan_of(model, Recompute(block="0"), Recompute(block="1"), offload("2"))

class Mean(torch.autograd.Function):
    "The mean over all ranks, as in a layer that synchronises its statistics."

    @staticmethod
    def forward(context, values):
        values = values / num_ranks
        distributed.all_reduce(values)
        return values

    @staticmethod
    def backward(context, gradient):
        gradient = gradient / num_ranks
        distributed.all_reduce(gradient)
        return gradient

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 1024), nn.Linear(1024, 64)

    def forward(self, x):
        mean = Mean.apply(x.mean(0)) if torch.is_grad_enabled() else 0
        return x + self.outer(torch.tanh(self.inner(x - mean)))

def made():
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(Block() for _ in range(4))))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def trained(model, optimizer, evaluates=False, rows=1024):
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(rows, 64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if evaluates and step == 0:
            if rank == 0:
                with torch.no_grad():
                    model(torch.randn(8, 64))
            distributed.barrier()  # the others wait for rank 0, which must not wait for them
    return losses

plain = trained(*made(), rows=4096)
held = torch.ones(rank * 120 << 18)  # so that the second process is 120 MiB larger, and would plan otherwise
model, optimizer = made()
with memwall.fit(model, optimizer, budget="8GiB") as session:
    trained(model, optimizer, rows=4096)
# The largest at which the larger process recomputes; the smaller one has room to keep everything. What a process holds
# beside tensors differs by tens of MiB from one session to the next, and a heap held to the budget does for a while.
budget, kinds = session.plan.forecast.steady_process_bytes, []
while "Recompute" not in kinds:
    budget -= 8 << 20
    model, optimizer = made()
    with memwall.fit(model, optimizer, budget=budget) as session:
        losses = trained(model, optimizer, evaluates=True, rows=4096)
    plan = session.plan
    kinds = [type(action).__name__ for action in plan.actions]

def sharded():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for unit in (*model, model):
        fully_shard(unit)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def moved_by(model, optimizer):
    with memwall.fit(model, optimizer, plan=of_shards(model)) as session:
        losses = trained(model, optimizer)
    return session.measured.bytes_to_tier, losses

plain_shards = trained(*sharded())
moved, shards = moved_by(*sharded())
whole = nn.Sequential(*(Block() for _ in range(4)))
moved_of_whole, _ = moved_by(whole, torch.optim.AdamW(whole.parameters()))
model, optimizer = sharded()
with memwall.fit(model, optimizer, budget="8GiB") as session:
    kept = trained(model, optimizer)
recorded = [s.nbytes for s in session.trace.steps[0].storages if s.category == "parameter"]
own = sum(p.to_local().nbytes for p in model.parameters())
fed = [s.nbytes for s in session.trace.steps[0].storages if s.category == "input"]

from memwall.apply.precision import LowerPrecision
torch.manual_seed(0)
whole = nn.Linear(8, 8)
model, optimizer = DistributedDataParallel(whole), torch.optim.SGD(whole.parameters(), lr=0.1)
lower = LowerPrecision(whole, "float16")
for step in range(3):
    # In the second step the gradients of one rank overflow, and reach the other by the reduction.
    (model(torch.ones(2, 8)).square().mean() * (1e38 if (rank, step) == (1, 1) else 1.0)).backward()
    optimizer.step()
    optimizer.zero_grad()
lower.undo()
scaling = [lower.scaling.num_skipped_steps, lower.scaling.scale, whole.weight.sum().item()]

model, optimizer = made()
apply, refusal = AppliedPlan.apply, ""
def apply_or_fail(applied):
    if rank == 1:
        raise StoreError("the disk is full")
    apply(applied)
AppliedPlan.apply = apply_or_fail
try:
    with memwall.fit(model, optimizer, plan=plan):
        trained(model, optimizer)
except MemwallError as error:
    refusal = f"{type(error).__name__}: {error}"
found(plain=plain, losses=losses, plan=plan.plan_hash, kinds=[type(a).__name__ for a in plan.actions], refusal=refusal,
      plain_shards=plain_shards, shards=shards, kept=kept, recorded=sum(recorded), own=own, scaling=scaling,
      moved=moved, moved_of_whole=moved_of_whole, fed=max(fed))
"""


def test_two_ranks_have_one_plan_and_one_end(tmp_path: Path) -> None:
    """GIVEN a collective in each block, which recomputation on one rank alone would leave without its partner
    AND processes of different size, one of which evaluates after the first step while the other waits for it
    THEN both train on under the same plan, to the same losses
    AND where one cannot apply a plan, both end, and the other says why.

    GIVEN a model that fully_shard has divided THEN it trains to the same losses, recorded as under a plan
    AND what is recorded of its parameters are this rank's parts, and of gathered ones nothing is moved
    AND what gloo divides of a reduction was not there before the step, as a batch was.

    GIVEN gradients that overflow in float16 on one rank THEN every rank leaves that step out.
    """
    first, second = found_by_ranks(2, SCRIPT, tmp_path)
    assert "Recompute" in first["kinds"]
    assert first["plan"] == second["plan"]
    for ran in (first, second):
        assert ran["losses"] == ran["plain"]
    assert second["refusal"] == "StoreError: the disk is full"
    assert first["refusal"] == "RankError: rank 1 of 2 could not apply the plan, so no rank goes on: the disk is full"
    for ran in (first, second):  # under fully_shard
        assert ran["shards"] == ran["kept"] == ran["plain_shards"]
        assert ran["recorded"] == ran["own"]
        assert ran["fed"] == 1024 * 64 * 4
        assert ran["moved"] == ran["moved_of_whole"]
    assert first["scaling"] == second["scaling"]
    assert first["scaling"][0] == 1
    assert math.isfinite(first["scaling"][2])
