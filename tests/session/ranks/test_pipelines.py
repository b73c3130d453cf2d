"""Stages of torch's pipelines train under a plan each, on real gloo ranks, to the bits of plain torch."""

import json
from pathlib import Path

import pytest
import torch
from rank_runs import found_by_ranks, run_ranks, started_ranks
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

import memwall
from memwall.errors import UsageError

STAGES = """
import hashlib
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(64), nn.Linear(64, 1024), nn.Linear(1024, 64)
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.drop(self.outer(torch.tanh(self.inner(self.norm(x)))))

def made(kind, num_blocks):
    torch.manual_seed(rank)
    model = nn.Sequential(*(Block() for _ in range(num_blocks[rank])))
    stage = PipelineStage(model, rank, num_ranks, torch.device("cpu"))
    schedule = kind(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    return model, schedule, torch.optim.AdamW(model.parameters(), lr=1e-3)

def run(schedule, step, rows, losses=None):
    values = torch.Generator().manual_seed(step)
    batch, target = torch.randn(rows, 64, generator=values), torch.randn(rows, 64, generator=values)
    first, last = rank == 0, rank == num_ranks - 1
    schedule.step(*([batch] if first else []), **({"target": target, "losses": losses} if last else {}))

def evaluated(schedule, rows):
    first, last = rank == 0, rank == num_ranks - 1
    schedule.eval(*([torch.ones(rows, 64)] if first else []), **({"target": torch.ones(rows, 64)} if last else {}))

def trained(model, schedule, optimizer, rows=1024, steps=3):
    "Returns each micro-batch's loss, where this is the last stage, and a hash of the weights."
    found = []
    for step in range(steps):
        losses = []
        run(schedule, step, rows, losses)
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
        if step == 0:
            evaluated(schedule, rows)  # with gradients: torch's own eval turns none off
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return [*found, digest.hexdigest()]
"""

UNDER_PLANS = (
    STAGES
    + """
import memwall

def least_of(kind):
    "Returns what this rank's plain step needs, and the least that any plan of it does."
    model, schedule, optimizer = made(kind, [5, 3])
    with memwall.fit(model, optimizer, budget="8GiB") as session:
        trained(model, schedule, optimizer, steps=2)
    trace = session.trace
    forwards = sum(1 for name, _ in trace.steps[0].marks if name == "forward")
    forecast = session.plan.forecast
    return forwards, forecast.peak.process_bytes, forecast.smallest_feasible_budget_bytes

ran = {}
for name, kind in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
    plain = trained(*made(kind, [5, 3]))
    forwards, plain_bytes, least_bytes = least_of(kind)
    budget = torch.tensor([plain_bytes, least_bytes])
    distributed.all_reduce(budget, distributed.ReduceOp.MAX)
    budget = max(int(0.7 * budget[0]), int(budget[1]) + (4 << 20))
    model, schedule, optimizer = made(kind, [5, 3])
    with memwall.fit(model, optimizer, budget=budget) as session:
        planned = trained(model, schedule, optimizer)
        session.save_plan(f"{name}.json")
    peaks = [session.measured.peak_bytes, session.plan.forecast.steady_process_bytes]
    distributed.barrier()
    model, schedule, optimizer = made(kind, [5, 3])
    with memwall.fit(model, optimizer, plan=memwall.Plan.load(f"{name}.json")) as given:
        again = trained(model, schedule, optimizer)
    ran[name] = dict(plain=plain, planned=planned, again=again, budget=budget, forwards=forwards, peaks=peaks,
        plan=session.plan.plan_hash, given=given.plan.plan_hash,
        kinds=sorted({type(action).__name__ for action in session.plan.actions}))
found(**ran)
"""
)


@pytest.mark.slow(seconds=60)
def test_each_stage_has_a_plan_of_its_own_and_the_bits_of_plain_torch(tmp_path: Path) -> None:
    """GIVEN two stages of unlike size, and a schedule that evaluates between its steps
    WHEN each rank is given 70 % of what the larger one's plain step needs, or little more than the least plan
    THEN each has a plan of its own, and both train to the bits of plain torch, within that budget
    AND one file has both plans, by which both train to the same bits again.
    """
    ranks = found_by_ranks(2, UNDER_PLANS, tmp_path)
    for schedule in ("gpipe", "1f1b"):
        for ran in (rank[schedule] for rank in ranks):
            assert ran["plain"] == ran["planned"] == ran["again"]
            assert ran["plan"] == ran["given"]
            assert ran["forwards"] == (4 if schedule == "gpipe" else ran["forwards"])
            assert ran["peaks"][0] < ran["budget"]
            assert ran["peaks"][0] == pytest.approx(ran["peaks"][1], rel=0.05)
        assert ranks[0][schedule]["plan"] != ranks[1][schedule]["plan"]
        plans = json.loads((tmp_path / f"{schedule}.json").read_text())
        assert plans["plan_of_rank"] == [0, 1]
        assert len({plan["model_fingerprint"] for plan in plans["plans"]}) == 2
    assert "Recompute" in ranks[0]["gpipe"]["kinds"]


UNTOUCHED = (
    """
import sys
import torch
from torch import distributed
distributed.init_process_group("gloo")
torch.set_num_threads(1)
rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
"""
    + STAGES
    + """
print(f"rank {rank}", trained(*made(Schedule1F1B, [2, 1]), rows=64))
distributed.barrier()
distributed.destroy_process_group()
"""
)


@pytest.mark.slow(seconds=20)
def test_a_script_of_stages_runs_as_it_is(tmp_path: Path) -> None:
    """GIVEN a budget that a script of stages does not need, and so would be handed over before its first forward
    THEN its ranks do not wait for each other, and print what they print without memwall.
    """
    (tmp_path / "script.py").write_text(UNTOUCHED)
    plain = run_ranks(2, "script.py", folder=tmp_path)
    ranks = started_ranks(2, "-m", "memwall", "run", "--budget", "8GiB", "script.py", folder=tmp_path)
    try:
        statuses = [rank.wait(timeout_s=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert statuses == [0, 0], ranks[0].said
    assert [rank.printed for rank in ranks] == plain
    assert "within the budget" in ranks[0].said  # as ranks say it that have met and planned


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kind", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble])
def test_a_schedule_that_runs_backward_twice_is_refused(kind: type) -> None:
    """GIVEN two stages on one rank THEN a schedule of whole backwards trains both, and one that divides them none."""
    models = [nn.Linear(4, 4) for _ in range(2)]
    stages = [PipelineStage(model, number, 2, torch.device("cpu")) for number, model in enumerate(models)]
    schedule = kind(stages, 2, loss_fn=lambda out, target: (out - target).square().mean())
    model = nn.Sequential(*models)
    with memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget="8GiB"):
        if kind is ScheduleInterleaved1F1B:
            schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
        else:
            with pytest.raises(UsageError, match="ScheduleInterleavedZeroBubble computes the gradients of weights"):
                schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
    assert all((one.weight.grad is not None) == (kind is ScheduleInterleaved1F1B) for one in models)
