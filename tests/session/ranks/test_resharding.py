"""Units of a model that the script has divided by FSDP2 stay gathered, or do not, as a given plan says."""

from pathlib import Path

import pytest
from rank_runs import found_by_ranks

pytestmark = pytest.mark.slow(seconds=20)

SCRIPT = """
import memwall
from msgspec.structs import replace
from plans import plan_of
from sharded_runs import network_for
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from memwall.errors import MemwallError
from memwall.planning.ranks.forecast import RanksForecast
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.sharding.fsdp2 import Fsdp2

UNITS = ("0", "1", "2", "3")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, values):
        return values + self.outer(torch.tanh(self.inner(values)))

def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in UNITS))
    for unit in model:
        fully_shard(unit, **options)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

def planned(model, **chosen):
    plan = plan_of(model, Recompute(block="1"))
    ranks = RanksForecast(network=network_for(2), link=None, chosen=Fsdp2(**chosen), units=UNITS, choices=(), curve=())
    return replace(plan, forecast=replace(plan.forecast, ranks=ranks))

def whole_after_forward(model):
    return [path for path in UNITS if not isinstance(model.get_submodule(path).inner.weight, DTensor)]

def trained(model, optimizer):
    losses, whole = [], []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(32, 64)).square().mean()
        whole.append(whole_after_forward(model))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, whole, [p.to_local().tolist() for p in model.parameters()]

def under(chosen, **options):
    model, optimizer = made(**options)
    with memwall.fit(model, optimizer, plan=planned(model, **chosen)):
        losses, whole, weights = trained(model, optimizer)
    model(torch.randn(32, 64)).sum().backward()  # reshards all
    model(torch.randn(32, 64))
    return losses == plain[0], weights == plain[2], whole, whole_after_forward(model)

plain = trained(*made())
cases = dict(
    last=under(dict(num_kept=2)),
    none=under({}, reshard_after_forward=False),
    all=under(dict(reshard="no")),
)
model, optimizer = made()
refusal = ""
try:
    with memwall.fit(model, optimizer, plan=planned(model, num_kept=1 + rank)):
        trained(model, optimizer)
except MemwallError as error:
    refusal = str(error)
found(plain=plain[1], cases=cases, refusal=refusal)
"""


def test_units_stay_gathered_as_planned_and_train_to_the_same_bits(tmp_path: Path) -> None:
    """GIVEN a script that divides its model WHEN it trains under a plan for ranks THEN each unit does as planned
    AND losses and weights have the bits of plain torch AND afterwards units do again as the script has said
    AND ranks whose plans keep other units all end.
    """
    for rank in found_by_ranks(2, SCRIPT, tmp_path):
        every = ["0", "1", "2", "3"]
        assert rank["plain"] == [[]] * 3
        assert rank["cases"] == {
            "last": [True, True, [["2", "3"]] * 3, []],
            "none": [True, True, [[]] * 3, every],
            "all": [True, True, [every] * 3, []],
        }
        assert "give all ranks that train one model the same plan" in rank["refusal"]
