"""Optimizer state on disk: the same bits as in memory, and every loop, scheduler and checkpoint works as before."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import every_value
from optimizer_runs import OPTIMIZERS, Net, are_equal, in_groups, resident_state_bytes, same, train, train_step
from torch import Tensor, nn

from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.errors import ApplyError
from memwall.store.buckets import BucketBuffer, DiskBucket
from memwall.store.transfer import TransferPool

KIB = 1 << 10
MOMENTUM = {"AdamW": "exp_avg", "Adam": "exp_avg", "sgd for-loop": "momentum_buffer", "Lion": "exp_avg"}
pytestmark = pytest.mark.timeout(60)


# The same bits.


@pytest.mark.parametrize(
    ("name", "begin"), every_value(sorted(OPTIMIZERS), {"from the first step": 0, "from the third step": 2})
)
def test_training_is_bitwise_equal(
    name: str, begin: int, keep: Callable[..., OptimizerState], state_pool: TransferPool
) -> None:
    plain, kept = train(OPTIMIZERS[name]), train(OPTIMIZERS[name], keep, begin=begin)
    assert are_equal(plain, kept)
    has_state = any(isinstance(v, Tensor) and v.numel() > 1 for s in plain[1]["state"].values() for v in s.values())
    assert (state_pool.bytes_written > 100 * KIB) == (has_state and name != "Adafactor")


@pytest.mark.parametrize("name", ["AdamW", "Adam", "sgd for-loop", "Adafactor", "Lion"])
def test_whole_training_ends_with_the_same_bits(
    name: str, keep: Callable[..., OptimizerState], state_pool: TransferPool
) -> None:
    """GIVEN accumulation, clipping, a schedule and two groups, of which one has a vector that is large by itself."""
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        model.register_parameter("offset", nn.Parameter(torch.randn(3000)))
        model.register_forward_hook(lambda net, _, out: out + net.offset.square().mean())
        optimizer = OPTIMIZERS[name](in_groups(model))
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        if is_kept:
            keep(optimizer)
        for step in range(8):
            train_step(model, optimizer, step)
            schedule.step()
        found.append((model, optimizer.state_dict()))
        if is_kept:  # Adafactor factors matrices; the vector's variance is as large as the vector
            assert optimizer.state[model.offset]["variance" if name == "Adafactor" else MOMENTUM[name]].is_meta
            assert optimizer.state_dict()["param_groups"][0]["lr"] != optimizer.defaults["lr"]
    assert are_equal(*found)
    assert state_pool.bytes_read > 6 * 12000


def test_training_with_muon_is_bitwise_equal(keep: Callable[..., OptimizerState], state_pool: TransferPool) -> None:
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.Muon(groups[0]["params"], lr=1e-2)

    assert are_equal(train(make), train(make, keep))
    assert state_pool.bytes_written > 100 * KIB


@pytest.mark.parametrize(
    ("bucket_bytes", "resident_bytes"),
    every_value({"one parameter": 1, "a few": 40 * KIB, "all": 1 << 20}, {"none": 0, "some": 50 * KIB, "all": 1 << 20}),
)
def test_sizes_change_nothing_but_the_bytes_moved(
    bucket_bytes: int, resident_bytes: int, keep: Callable[..., OptimizerState], state_pool: TransferPool
) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    settled = partial(keep, bucket_bytes=bucket_bytes, resident_bytes=resident_bytes)
    assert are_equal(train(make), train(make, settled, begin=1))
    assert (state_pool.bytes_written == 0) == (resident_bytes == 1 << 20)


def test_a_scheduler_made_afterwards_and_one_made_before_both_work(
    keep: Callable[..., OptimizerState], recwarn: pytest.WarningsRecorder
) -> None:
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters())
        before = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        if is_kept:
            keep(optimizer)
        after = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            train_step(model, optimizer, step)
            before.step()
            after.step()
        found.append((model, optimizer.state_dict()))
    assert are_equal(*found)
    assert not [str(w.message) for w in recwarn if "lr_scheduler" in str(w.message)]


@pytest.mark.parametrize("name", ["adamw for-loop", "adamw fused"])
def test_a_gradient_scaler_skips_the_steps_it_would_skip(name: str, keep: Callable[..., OptimizerState]) -> None:
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = OPTIMIZERS[name](in_groups(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        if is_kept:
            keep(optimizer)
        for step in range(4):
            x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
            loss = model(x, step).square().mean() * (float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append((model, optimizer.state_dict()))
    assert are_equal(*found)


def test_a_closure_runs_once_and_its_loss_is_returned(keep: Callable[..., OptimizerState]) -> None:
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if is_kept:
            keep(optimizer)
        calls: list[int] = []

        def closure(
            model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer, calls: list[int] = calls
        ) -> float:
            calls.append(1)
            optimizer.zero_grad()
            loss = model(torch.ones(2, 32), 0).square().mean()
            loss.backward()
            return float(loss)

        with torch.no_grad():
            losses = [optimizer.step(closure), optimizer.step(closure=closure)]
        assert len(calls) == 2
        found.append((losses, dict(model.named_parameters()), optimizer.state_dict()))
    assert same(*found)


# What surrounds the step.


def test_step_hooks_run_once_and_see_all_groups(keep: Callable[..., OptimizerState]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(in_groups(model))
    groups = list(optimizer.param_groups)
    seen: list[tuple[str, list[int]]] = []

    def note(name: str, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        seen.append((name, [len(group["params"]) for group in optimizer.param_groups]))

    optimizer.register_step_pre_hook(partial(note, "before"))
    keep(optimizer)
    optimizer.register_step_post_hook(partial(note, "after"))
    for step in range(2):
        train_step(model, optimizer, step)
    sizes = [6, 7]
    assert seen == [("before", sizes), ("after", sizes)] * 2
    assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))


def test_a_pre_hook_that_would_run_after_the_update_is_refused(keep: Callable[..., OptimizerState]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    keep(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(ApplyError, match=r"a step pre-hook was registered on the AdamW after .* before the session"):
        train_step(model, optimizer, 0)
    handle.remove()
    train_step(model, optimizer, 0)
    optimizer.register_step_pre_hook(lambda *_: None)


def test_a_parameter_group_may_join_later(keep: Callable[..., OptimizerState]) -> None:
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        groups = in_groups(model)
        optimizer = torch.optim.AdamW(groups[:1])
        if is_kept:
            keep(optimizer)
        train_step(model, optimizer, 0)
        optimizer.add_param_group(groups[1])
        optimizer.param_groups[0]["lr"] = 0.5
        for step in range(1, 4):
            train_step(model, optimizer, step)
        found.append((model, optimizer.state_dict()))
    assert are_equal(*found)


def test_an_error_in_the_step_leaves_groups_and_state_as_they_were(keep: Callable[..., OptimizerState]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(in_groups(model))
    keep(optimizer)
    train_step(model, optimizer, 0)
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    before = optimizer.state_dict()
    for group in optimizer.param_groups:
        group["betas"] = "none"
    with pytest.raises(ValueError, match="unpack"):
        train_step(model, optimizer, 1)
    assert [len(group["params"]) for group in optimizer.param_groups] == sizes
    assert same(before["state"], optimizer.state_dict()["state"])


# Saving and loading.


def test_a_state_dict_is_whole_and_does_not_change_later(keep: Callable[..., OptimizerState], tmp_path: Path) -> None:
    plain_model, _ = train(OPTIMIZERS["adamw foreach"], num_steps=0)
    model = Net()
    model.load_state_dict(plain_model.state_dict())
    optimizer = OPTIMIZERS["adamw foreach"](in_groups(model))
    keep(optimizer)
    train_step(model, optimizer, 0)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    taken = optimizer.state_dict()
    saved = torch.load(tmp_path / "optimizer.pt")
    assert same(taken, saved)
    train_step(model, optimizer, 1)
    assert same(taken, saved)
    assert not same(taken["state"], optimizer.state_dict()["state"])
    assert (tmp_path / "optimizer.pt").stat().st_size < 2.5 * sum(p.nbytes for p in model.parameters())


def test_what_is_loaded_takes_the_place_of_what_was_on_disk(keep: Callable[..., OptimizerState]) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    model, state_dict = train(make, num_steps=2)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    found = []
    for is_kept in (False, True):
        model = Net()
        model.load_state_dict(weights)
        optimizer = make(in_groups(model))
        if is_kept:
            keep(optimizer)
            train_step(model, optimizer, 9)  # other state, which must not survive
            model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state_dict))  # torch steps what it was given in place
        assert resident_state_bytes(optimizer) == 0 or not is_kept
        for step in range(2, 4):
            train_step(model, optimizer, step)
        found.append((model, optimizer.state_dict()))
    assert are_equal(*found)


def test_undo_brings_the_state_back_and_training_goes_on(keep: Callable[..., OptimizerState]) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    plain = train(make, num_steps=4)
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    keeper = keep(optimizer)
    for step in range(4):
        if step == 2:
            keeper.undo()
            assert not any(v.is_meta for state in optimizer.state.values() for v in state.values())
            assert keeper.away_bytes == 0
            assert not optimizer._optimizer_step_pre_hooks
            assert not optimizer._optimizer_step_post_hooks
        train_step(model, optimizer, step)
        scheduler.step()
    assert are_equal(plain, (model, optimizer.state_dict()))


def test_state_that_leaves_passes_one_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN state in eight shares WHEN all of it leaves THEN one buffer is made for all, not one after the other, of
    which the C library would use none again."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    made: list[int] = []
    original = DiskBucket.passing_buffer

    def counted(bucket: DiskBucket, num_bytes: int) -> BucketBuffer:
        made.append(num_bytes)
        return original(bucket, num_bytes)

    monkeypatch.setattr(DiskBucket, "passing_buffer", counted)
    state, close = open_optimizer_state(
        optimizer, disk=str(tmp_path), capacity_bytes=None, resident_bytes=0, bucket_bytes=1, min_bytes=1024
    )
    assert len(state.buckets) == 8
    assert made == [max(bucket.num_bytes for bucket in state.buckets)]
    close()
