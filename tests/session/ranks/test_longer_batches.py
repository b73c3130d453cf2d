"""A batch on one rank that has no room under the plan of all is recorded by all of them, before its forward."""

from pathlib import Path

import pytest
from rank_runs import found_by_ranks

pytestmark = pytest.mark.slow(seconds=20)

SCRIPT = """
import memwall
from memwall.machine.meter import process_bytes, return_free_memory
from torch.nn.parallel import DistributedDataParallel

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
return_free_memory()
held = [None] * num_ranks
distributed.all_gather_object(held, process_bytes())
states = []
with memwall.fit(model, optimizer, budget=max(held) + (220 << 20)) as session:
    for step, size in enumerate((64, 64, 2048, 64, 2048)):
        # The longer batches come to one rank, and then to the other one.
        loss = model(torch.ones(size if rank == (step == 4) else 64, 256)).square().mean()
        states.append(session.state)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
found(states=states, plan=session.plan.plan_hash, excess=session.measured.overall_peak_bytes - session.budget_bytes)
"""


def test_a_longer_batch_on_one_rank_is_recorded_by_all_once(tmp_path: Path) -> None:
    """GIVEN a longer batch on one rank, and later on another one THEN all have recorded the first, and none the second
    AND all have one plan, within the budget.
    """
    one, other = found_by_ranks(2, SCRIPT, tmp_path)
    assert one["states"] == other["states"] == ["recording", "running", "recording", "running", "running"]
    assert one["plan"] == other["plan"]
    assert max(one["excess"], other["excess"]) <= 0
