"""Optimizer state on disk: how much is in memory when, which optimizers are refused, and disks that fail."""

import errno
import functools
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_runs import Make, Net, are_equal, resident_state_bytes, train, train_step

from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.errors import ApplyError, OffloadIOError, StoreError
from memwall.store.backend import SystemBackend
from memwall.store.buckets import DiskSpace
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10
pytestmark = pytest.mark.timeout(60)


# How much is where.
def test_between_steps_only_the_resident_part_is_in_memory_and_in_a_step_one_bucket_besides(
    keep: Callable[..., OptimizerState],
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    whole_bytes = resident_state_bytes(optimizer)
    keeper = keep(optimizer, resident_bytes=40 * KIB)
    resident_bytes = resident_state_bytes(optimizer)
    assert 16 * KIB <= resident_bytes <= 40 * KIB
    assert resident_bytes + keeper.away_bytes - whole_bytes < 4096 * 10
    seen = []
    inner = keeper._inner_step

    def spy(*args: Any, **kwargs: Any) -> None:
        seen.append(resident_state_bytes(optimizer))
        inner(*args, **kwargs)

    keeper._inner_step = spy
    train_step(model, optimizer, 2)
    assert len(seen) > 3
    assert max(seen) <= resident_bytes + 40 * KIB
    assert resident_state_bytes(optimizer) == resident_bytes
    assert set(optimizer.state) == set(model.parameters())


def test_the_next_bucket_is_read_while_one_is_stepped(
    keep: Callable[..., OptimizerState], state_pool: TransferPool
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    keeper = keep(optimizer)
    sizes = [share.bucket.num_bytes for share in keeper._shares.every]
    begun_bytes = state_pool.bytes_read
    inner, number = keeper._inner_step, 0

    def slow(*args: Any, **kwargs: Any) -> None:
        nonlocal number
        read_bytes = begun_bytes + sum(sizes[: number + 2])
        deadline = time.monotonic() + 10
        while state_pool.bytes_read < read_bytes:
            assert time.monotonic() < deadline, f"bucket {number + 1} is not being read"
            time.sleep(0.001)
        number += 1
        inner(*args, **kwargs)

    keeper._inner_step = slow
    optimizer.param_groups[0]["params"] = [p for p in model.parameters() if optimizer.state[p]["exp_avg"].is_meta]
    train_step(model, optimizer, 2)
    assert number == len(sizes) > 3


def test_parameters_without_gradients_cost_no_transfer(
    keep: Callable[..., OptimizerState], state_pool: TransferPool
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    keep(optimizer, bucket_bytes=1)
    before = state_pool.bytes_read
    train_step(model, optimizer, 2)
    with_rare = state_pool.bytes_read - before
    train_step(model, optimizer, 3)
    assert with_rare - (state_pool.bytes_read - before - with_rare) == 2 * model.rare.weight.nbytes


# What is refused.


class Own(torch.optim.Optimizer):
    """An optimizer that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Nothing."""


class OtherStep(torch.optim.AdamW):
    """One that does something of its own."""

    def step(self, closure: Any = None) -> Any:
        """As ever, or so it says."""
        return super().step(closure)


class Lion(Own):
    """One that shares its name with a class that is known."""


class OtherDefaults(torch.optim.AdamW):
    """One that only sets defaults."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, r"the state of torch\.optim\.lbfgs\.LBFGS cannot be kept on disk: .* AdamW, "),
        (Own, r"\.Own cannot be kept on disk: .* use one of these, or plan without moving optimizer state"),
        (OtherStep, r"\.OtherStep cannot be kept on disk"),
        (Lion, r"test_limits\.Lion cannot be kept on disk: .* and lion-pytorch's Lion alone"),
        (partial(torch.optim.Adam, differentiable=True), "a differentiable Adam .* pass differentiable=False"),
    ],
    ids=["LBFGS", "own", "other step", "another of that name", "differentiable"],
)
def test_an_optimizer_that_may_not_be_stepped_in_parts_is_refused_by_name(
    make: Make, words: str, keep: Callable[..., OptimizerState]
) -> None:
    optimizer = make(Net().parameters())
    with pytest.raises(ApplyError, match=words):
        keep(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_wrapper_around_the_class_is_not_run_for_every_bucket(
    keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.optim.AdamW(Net().parameters())  # torch wraps the step of a class when it makes the first of them
    original = torch.optim.AdamW.step

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", wrapped)
    with pytest.raises(ApplyError, match=r"AdamW\.step was replaced by a wrapper .* or register a step hook"):
        keep(torch.optim.AdamW(Net().parameters()))


def test_one_that_inherits_its_step_is_not(keep: Callable[..., OptimizerState]) -> None:
    assert are_equal(train(OtherDefaults), train(OtherDefaults, keep))


# Faults.


class Faulty(SystemBackend):
    """Fails one kind of call once `num_good` of them have passed."""

    def __init__(self, kind: str, num_good: int) -> None:
        self.kind, self.num_good = kind, num_good

    def _count(self, kind: str) -> None:
        self.num_good -= kind == self.kind
        if kind == self.kind and self.num_good < 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("write")
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._count("read")
        return super().pread(fd, buffer, offset)


def faulty_pool(tmp_path: Path, kind: str, num_good: int) -> TransferPool:
    return TransferPool(ScratchFile(tmp_path, backend=Faulty(kind, num_good)), block_bytes=8 * KIB)


@pytest.mark.parametrize(("kind", "num_good"), [("read", 0), ("read", 3), ("write", 20), ("write", 23)])
def test_a_failing_disk_ends_the_step_with_an_error_and_so_does_every_further_one(
    kind: str, num_good: int, tmp_path: Path
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    with faulty_pool(tmp_path, kind, num_good) as pool:
        keeper = OptimizerState(optimizer, DiskSpace(pool), resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB)
        for _ in range(2):
            with pytest.raises(OffloadIOError, match=r"bucket \d of the AdamW's state in .* Input/output error"):
                train_step(model, optimizer, 2)
        assert isinstance(keeper.failure, OffloadIOError)
        assert [len(group["params"]) for group in optimizer.param_groups] == [len(list(model.parameters()))]
        with pytest.raises(OffloadIOError):
            optimizer.state_dict()


def test_a_disk_that_fails_at_the_beginning_leaves_the_state_in_memory(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    before = {p: dict(state) for p, state in optimizer.state.items()}
    with faulty_pool(tmp_path, "write", 5) as pool, pytest.raises(OffloadIOError):
        OptimizerState(optimizer, DiskSpace(pool), resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB)
    assert all(optimizer.state[p][key] is value for p, state in before.items() for key, value in state.items())
    train_step(model, optimizer, 1)


def test_too_little_disk_is_said_before_anything_moves(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(StoreError, match=r"of disk are needed in .* raise the limit with --disk .*:SIZE"):
        open_optimizer_state(
            optimizer,
            disk=str(tmp_path),
            capacity_bytes=64 * KIB,
            resident_bytes=0,
            bucket_bytes=40 * KIB,
            min_bytes=KIB,
        )
    assert not optimizer._optimizer_step_pre_hooks
    train_step(model, optimizer, 0)
