"""Bytes that ranks hold: FSDP2 on gloo, each operation metered, against the step that is made from one process."""

from pathlib import Path

import pytest
from rank_runs import found_by_ranks
from sharded_runs import network_for, ranked_plan, workload

from memwall.predict.curve import live_curve, live_peak_bytes
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.units import find_units
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record

SCRIPT = """
from sharded_runs import LiveBytes, Model, batch, loss_of, trained
import memwall

def measured(plan):
    tokens = batch()
    model = memwall.shard(Model(), memwall.Plan.load(plan))
    optimizer, step = trained(model, tokens)
    state = [value for of_one in optimizer.state.values() for value in of_one.values()]
    standing = [getattr(tensor, "_local_tensor", tensor) for tensor in (*model.parameters(), *state, tokens)]
    with LiveBytes(standing) as meter:
        before = meter.bytes
        step()
    return before, meter.peak_bytes

def losses(divided):
    torch.manual_seed(0)
    model, tokens, found_losses = divided(Model()), batch(), []
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found_losses.append(loss.item())
    return found_losses

sharded = losses(lambda model: memwall.shard(model, memwall.Plan.load("some ahead.json")))
peaks = {mode: measured(f"{mode}.json") for mode in MODES}
found(plain=losses(lambda model: model), sharded=sharded, **peaks)
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_rank_of_fsdp2_holds_what_was_predicted(num_ranks: int, tmp_path: Path) -> None:
    """GIVEN a model that `memwall.shard` divided, each way to reshard, of some units too, and gathered further ahead
    THEN standing bytes and the peak of the step are predicted to a tenth of a percent, and under autocast the losses
    are those of one process, bit for bit."""
    trace = record(workload())
    step = steady_step(trace)
    network = network_for(num_ranks, max(2, num_ranks // 2))
    kinds = {"yes": Fsdp2(), "no": Fsdp2(reshard="no"), "some": Fsdp2(num_kept=3)}
    kinds |= {"ahead": Fsdp2(num_ahead=2), "some ahead": Fsdp2(num_kept=2, num_ahead=3)}
    if num_ranks > 2:
        kinds |= {"node": Fsdp2(reshard="node"), "some or node": Fsdp2(reshard="node", num_kept=2)}
    units = tuple(unit.path for unit in find_units(trace, step) if not unit.is_root)
    for name, kind in kinds.items():
        ranked_plan(kind, network, units=units).save(tmp_path / f"{name}.json")
    measured = found_by_ranks(num_ranks, f"MODES = {tuple(kinds)}\n{SCRIPT}", tmp_path)
    assert all(of_rank["sharded"] == of_rank["plain"] for of_rank in measured)
    for name, kind in kinds.items():
        rank = kind.cost(trace, step, find_units(trace, step), network).step
        before = int(live_curve(rank.storages, len(rank.ops), device="cpu")[-1])
        for of_rank in measured:
            assert of_rank[name] == pytest.approx([before, live_peak_bytes(rank, "cpu")], rel=1e-3)
