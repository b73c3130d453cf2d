"""Optimizer state on disk as a plan's action: placed, moved between plans, and given other sizes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import every_value
from optimizer_runs import OPTIMIZERS, Net, are_equal, in_groups, resident_state_bytes, same, train, train_step
from plans import plan_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

import memwall
from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.apply.streaming.parameter_keeper import ParameterKeeper
from memwall.errors import StoreError
from memwall.planning.planfile import Plan
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.store.buckets import Bucket

KIB = 1 << 10
pytestmark = [pytest.mark.leaves_changed, pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


def plan_for(model: torch.nn.Module) -> Plan:
    return plan_of(model, OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB))


def applied_to(model: torch.nn.Module, keeper: StateKeeper) -> AppliedPlan:
    return AppliedPlan(
        model,
        plan_for(model).actions,
        block_order=(),
        disk=None,
        disk_capacity_bytes=None,
        allocator=AllocatorHandler(),
        micro=MicroBatches(),
        keeper=keeper,
        parameters=ParameterKeeper(None, None),
        is_cooperative=False,
    )


# In a plan.


@pytest.mark.slow
def test_a_plan_with_a_placement_trains_to_the_same_bits(tmp_path: Path) -> None:
    make = OPTIMIZERS["adamw foreach"]
    plain = train(make, num_steps=4)
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with memwall.fit(model, optimizer, plan=plan_for(model), disk=str(tmp_path)) as session:
        for step in range(4):
            train_step(model, optimizer, step)
            scheduler.step()
            assert resident_state_bytes(optimizer) == 0
    assert session.measured.bytes_to_tier > 0
    assert session.measured.bytes_from_tier > 0
    assert resident_state_bytes(optimizer) > 0
    assert are_equal(plain, (model, optimizer.state_dict()))
    assert not list(tmp_path.iterdir())


def test_an_optimizer_that_shows_itself_at_its_first_step_is_placed_then(tmp_path: Path) -> None:
    model = Net()
    keeper = StateKeeper(str(tmp_path), None)
    applied = applied_to(model, keeper)
    applied.apply()
    optimizer = torch.optim.AdamW(model.parameters())
    handle = register_optimizer_step_pre_hook(lambda found, *_: applied.add_optimizer(found))
    try:
        train_step(model, optimizer, 0)
    finally:
        handle.remove()
    assert resident_state_bytes(optimizer) == 0
    assert keeper.moved_bytes()[0] > 0
    applied.undo()
    assert resident_state_bytes(optimizer) > 0


def test_state_that_the_next_plan_wants_on_disk_stays_there_and_else_comes_back(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    keeper = StateKeeper(str(tmp_path), None)
    first, second = applied_to(model, keeper), applied_to(model, keeper)
    first.optimizers = second.optimizers = (optimizer,)
    first.apply()
    written_bytes, _ = keeper.moved_bytes()
    assert written_bytes > 0
    first.undo(keeps_state=True)
    second.apply()
    assert keeper.moved_bytes() == (0, 0)
    assert resident_state_bytes(optimizer) == 0
    without = applied_to(model, keeper)
    without.actions = ()
    second.undo(keeps_state=True)
    without.apply()
    assert resident_state_bytes(optimizer) > 0
    assert not keeper.is_away


# Other sizes.


@pytest.mark.parametrize(
    ("begin", "then"),
    every_value(
        {"all": (0, 40 * KIB), "some": (50 * KIB, 1), "none": (1 << 20, 40 * KIB)},
        [(0, 40 * KIB), (0, 1), (50 * KIB, 40 * KIB), (1 << 20, 1)],
    ),
)
def test_other_sizes_between_steps_change_no_bits(
    begin: tuple[int, int], then: tuple[int, int], keep: Callable[..., OptimizerState]
) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    plain = train(make, num_steps=4)
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = keep(optimizer, resident_bytes=begin[0], bucket_bytes=begin[1])
    reference = None
    for step in range(4):
        if step == 2:
            state.settle(resident_bytes=then[0], bucket_bytes=then[1])
            torch.manual_seed(0)
            other = Net()
            reference = make(in_groups(other))
            fresh = keep(reference, resident_bytes=then[0], bucket_bytes=then[1])
            assert [len(s.parameters) for s in state._shares.every] == [len(s.parameters) for s in fresh._shares.every]
        train_step(model, optimizer, step)
        scheduler.step()
    assert are_equal(plain, (model, optimizer.state_dict()))
    assert (resident_state_bytes(optimizer) == 0) == (then[0] == 0)


def test_going_over_to_other_sizes_holds_a_bucket_at_a_time(
    keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    state = keep(optimizer, bucket_bytes=1)
    largest_bytes = max(share.bucket.num_bytes for share in state._shares.every)
    seen: list[int] = []
    bring = Bucket.bring_back

    def watched(bucket: Bucket[Any]) -> None:
        bring(bucket)
        seen.append(resident_state_bytes(optimizer))

    monkeypatch.setattr(Bucket, "bring_back", watched)
    state.settle(resident_bytes=0, bucket_bytes=80 * KIB)
    assert len(seen) > 3
    assert max(seen) <= 80 * KIB + largest_bytes
    assert resident_state_bytes(optimizer) == 0


def test_state_that_was_on_its_way_to_other_sizes_is_found_when_a_transfer_fails(
    keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    model, _ = plain = train(make, num_steps=2)
    optimizer = make(in_groups(model))
    optimizer.load_state_dict(plain[1])
    state = keep(optimizer, bucket_bytes=1)
    bring, number = Bucket.bring_back, 0

    def failing(bucket: Bucket[Any]) -> None:
        nonlocal number
        number += 1
        if number == 3:
            raise StoreError("the disk is gone")
        bring(bucket)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "bring_back", failing)
        with pytest.raises(StoreError, match="the disk is gone"):
            state.settle(resident_bytes=0, bucket_bytes=80 * KIB)
    state.undo()
    assert same(plain[1]["state"], optimizer.state_dict()["state"])
