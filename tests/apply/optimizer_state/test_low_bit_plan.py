"""Moments in 8 bits as a plan's action: applied, moved between plans and from disk, and met in bytes by a real run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_runs import Net, in_groups, train_step
from plans import plan_of
from torch import nn
from warm_python import printed_by

import memwall
from memwall.apply.optimizer_state.low_bit_form import load_torchao
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.errors import ApplyError, NoEffectError
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.predict.malloc.tensor_heap import heap_unavailable_reason
from memwall.store.buckets import Bucket

KIB = 1 << 10
ON_DISK = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB)
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread"), pytest.mark.requires("torchao")]


def num_low(optimizer: torch.optim.Optimizer) -> int:
    form = load_torchao()
    return sum(isinstance(value, form) for state in optimizer.state.values() for value in state.values())


def test_a_plan_with_it_trains_with_the_loops_own_optimizer() -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(in_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with memwall.fit(model, optimizer, plan=plan_of(model, LowBitState())) as session:
        for step in range(4):
            train_step(model, optimizer, step)
            scheduler.step()
            assert num_low(optimizer) == 6
    assert session.measured.bytes_to_tier == 0
    assert num_low(optimizer) == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**4)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0, 4.0}


def test_from_disk_moments_come_a_bucket_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    whole = copy.deepcopy(optimizer.state_dict())
    keeper = StateKeeper(str(tmp_path), None)
    keeper.place([optimizer], ON_DISK)
    form, seen, bring_back = load_torchao(), [], Bucket.bring_back

    def watched(bucket: Bucket[Any]) -> None:
        bring_back(bucket)
        large = [v for state in optimizer.state.values() for v in state.values() if v.numel() == 64 * 64]
        seen.append(sum(not isinstance(v, form) and not v.is_meta for v in large))

    monkeypatch.setattr(Bucket, "bring_back", watched)
    keeper.close_moments(optimizer)
    assert num_low(optimizer) == 6
    assert max(seen) == 2, "both moments of one matrix"
    assert not keeper.is_away
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert (value - whole["state"][index][key]).norm() <= 0.02 * value.norm()
    keeper.place([optimizer], ON_DISK)
    assert (num_low(optimizer), keeper.is_away) == (0, True)
    keeper.bring_back()
    assert not keeper.is_away


def test_a_plan_that_follows_finds_them_as_they_are() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    keeper = StateKeeper(None, None)
    keeper.close_moments(optimizer)
    codes = [optimizer.state[p]["exp_avg"] for p in model.parameters() if p.shape == (64, 64)]
    keeper.close_moments(optimizer)
    assert all(a is optimizer.state[p]["exp_avg"] for a, p in zip(codes, [m.weight for m in model.middle], strict=True))
    keeper.bring_back()
    assert num_low(optimizer) == 0


def test_where_nothing_can_be_in_8_bits_the_run_stops() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        with memwall.fit(model, optimizer, plan=plan_of(model, LowBitState())):
            for _ in range(4):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()

    with pytest.raises(NoEffectError, match=r"no moment of the AdamW is: .* or have less than 4,096 elements"):
        train()


def test_several_optimizers_are_refused() -> None:
    model = Net()
    optimizers = [torch.optim.AdamW(part.parameters()) for part in (model.first, model.middle)]
    with (
        pytest.raises(ApplyError, match=r"state in 8 bits, and this model is stepped by several \(AdamW \+ AdamW\)"),
        memwall.fit(model, optimizers, plan=plan_of(model, LowBitState())),
    ):
        model(torch.ones(2, 32), 0)


_SCRIPT = """
import json, sys
import torch
from torch import nn
import memwall
from memwall.errors import InfeasibleError
from memwall.planning.techniques import optimizer_state
from memwall.planning.settings import Settings
from memwall.planning.search import make_plan

budget_bytes, disk = int(sys.argv[1]), sys.argv[2]
allow = ("low-bit-optimizer",)
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer_state.TECHNIQUE.locations = lambda *_: ()  # as on a disk that is too slow for it

def train(num_steps, after_first=lambda: None):
    for step in range(num_steps):
        x = torch.randn(16, 1024, generator=torch.Generator().manual_seed(step))
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            after_first()

def smallest(trace, **settings):
    try:
        make_plan(trace, Settings(budget_bytes=1 << 20, **settings))
    except InfeasibleError as error:
        return error.smallest_feasible_bytes

if not budget_bytes:
    session = memwall.fit(model, optimizer, budget=1 << 20, disk=disk, allow=allow)
    try:
        train(1, session.end_step)
    except InfeasibleError as error:
        out = {"with": error.smallest_feasible_bytes, "without": smallest(session.trace)}
else:
    with memwall.fit(model, optimizer, budget=budget_bytes, disk=disk, allow=allow) as session:
        train(4)
    measured, forecast = session.measured, session.plan.forecast
    out = {
        "kinds": [type(action).__name__ for action in session.plan.actions],
        "predicted": forecast.phases["steady_step"].process_bytes,
        "margin": forecast.margin_bytes,
        "steady": measured.peak_bytes,
        "overall": measured.overall_peak_bytes,
        "replans": measured.num_replans,
    }
print(json.dumps(out))
"""


def in_a_process(budget_bytes: int, tmp_path: Path) -> Any:
    """What one run prints."""
    return printed_by(_SCRIPT, budget_bytes, tmp_path)


@pytest.mark.skipif(bool(heap_unavailable_reason()), reason=f"no tensor heap: {heap_unavailable_reason()}")
def test_a_budget_that_is_infeasible_without_it_is_kept_by_the_process(tmp_path: Path) -> None:
    probe = in_a_process(0, tmp_path)
    state_bytes = 2 * 16 * 1024 * 1024 * 4
    assert probe["with"] < probe["without"] - 0.5 * state_bytes
    budget_bytes = probe["with"] + (probe["without"] - probe["with"]) // 4
    run = in_a_process(budget_bytes, tmp_path)
    assert "LowBitState" in run["kinds"]
    # The first step too, whose state was whole, and on disk.
    assert run["overall"] <= budget_bytes
    assert abs(run["steady"] - run["predicted"]) <= run["margin"]
    assert run["replans"] == 0
    assert not list(tmp_path.iterdir())
