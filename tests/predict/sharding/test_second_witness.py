"""A rank of FSDP2 holds what torch's own FSDPMemTracker says, a witness that shares nothing with memwall's meters."""

from pathlib import Path

import pytest
from rank_runs import found_by_ranks
from sharded_runs import network_for, ranked_plan, workload

from memwall.predict.curve import peak_of
from memwall.predict.sharding.fsdp2 import Fsdp2, Reshard
from memwall.predict.sharding.units import ShardUnit, find_units
from memwall.trace.records import Step
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record

SCRIPT = """
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from sharded_runs import Model, batch, let_go, trained
import memwall

class Tracker(FSDPMemTracker):
    def __torch_dispatch__(self, *operation):
        let_go()
        return super().__torch_dispatch__(*operation)

tokens = batch()

def tracked(plan):
    model = memwall.shard(Model(), memwall.Plan.load(plan))
    optimizer, step = trained(model, tokens)
    tracker = Tracker(model, optimizer)
    tracker.track_inputs((tokens,))
    with tracker:
        step()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {getattr(kind, "value", kind): num_bytes for kind, num_bytes in peak.items()}

found(**{path.removesuffix(".json"): tracked(path) for path in ("yes.json", "no.json", "node.json")
         if os.path.exists(path)})
"""
_GATHERED = ("Sharded Param", "Unsharded Param", "All Gather")
_GRADIENTS = ("Sharded Grad", "Unsharded Grad", "Reduce Scatter", "Temp")


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "modes"), [(2, ("yes", "no")), (4, ("node",))])
def test_torchs_own_tracker_finds_the_peak_that_was_predicted(
    num_ranks: int, modes: tuple[Reshard, ...], tmp_path: Path
) -> None:
    """GIVEN each way to reshard (a number of ranks that is neither one nor all needs four of them)
    THEN the tracker's peak is the forecast's to 2 %, and so is each kind of bytes but for what is named here."""
    trace = record(workload())
    step, network = steady_step(trace), network_for(num_ranks, 2)
    units = find_units(trace, step)
    for mode in modes:
        paths = tuple(unit.path for unit in units if not unit.is_root)
        ranked_plan(Fsdp2(reshard=mode), network, units=paths).save(tmp_path / f"{mode}.json")
    measured = found_by_ranks(num_ranks, SCRIPT, tmp_path)
    for mode in modes:
        peak = peak_of(trace, Fsdp2(reshard=mode).cost(trace, step, units, network).step)
        foreseen = {share.name: share.num_bytes for share in peak.by_category}
        # What a rank keeps for its node between forward and backward is made in forward: an activation to the tracker.
        blocks = sum(bytes_of(unit, step) for unit in units if unit.path.startswith(("blocks", "embed")))
        kept = blocks // 2 if mode == "node" else 0
        # Of the counts of steps, a float32 for each parameter, every rank has the whole, and the forecast a part.
        counts = 4 * sum(len(unit.parameters) for unit in units)
        for tracker in (of_rank[mode] for of_rank in measured):
            assert tracker["Total"] == pytest.approx(peak.live_bytes, rel=0.02)
            assert sum(tracker[kind] for kind in _GATHERED) == foreseen["parameter"] - kept
            assert tracker["OptState"] == foreseen["optimizer_state"] + counts - counts // num_ranks
            assert tracker["Inputs"] == foreseen["input"]
            # The loss's two numbers are activations to the tracker and temporaries to memwall, since no backward of
            # theirs comes after the peak.
            assert tracker["Activation"] == foreseen["activation"] + kept + 8
            assert sum(tracker[kind] for kind in _GRADIENTS) == foreseen["temporary"] + foreseen["gradient"] - 8


def bytes_of(unit: ShardUnit, step: Step) -> int:
    return sum(step.storages[index].nbytes for index in unit.parameters)
