"""State read while backward runs: the same bits, no more of it than is allowed, and nothing of it without a step."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_disk import Faulty
from optimizer_runs import OPTIMIZERS, Net, are_equal, train, train_step
from plans import plan_of
from torch import nn

import memwall
from memwall.apply.optimizer_state.on_disk import OptimizerState
from memwall.apply.optimizer_state.spaces import DiskSpace
from memwall.errors import OffloadIOError
from memwall.plan.actions import OptimizerPlacement, StateAhead
from memwall.store.buckets import Bucket, BucketBuffer
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool

KIB = 1 << 10
NUM_GRADIENTS = 13
"""Of one backward of `Net`."""
ADAMW = partial(torch.optim.AdamW, lr=1e-2)
pytestmark = pytest.mark.timeout(60)


def ahead(*figures: tuple[int, int]) -> tuple[StateAhead, ...]:
    return tuple(StateAhead(after_gradients=count, buffer_bytes=num_kib * KIB) for count, num_kib in figures)


A_LITTLE, GROWING, ALL = ahead((3, 50)), ahead((2, 45), (5, 90), (9, 130)), ahead((1, 1 << 10))


class Buffers:
    """Every buffer that was made, and whether it was made while backward ran."""

    def __init__(self) -> None:
        self.in_backward: list[int] = []
        self.elsewhere: list[int] = []


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    made, new_buffer = Buffers(), Bucket.new_buffer

    def counted(bucket: Bucket[Any], num_bytes: int) -> BucketBuffer:
        in_backward = torch._C._current_autograd_node() is not None
        (made.in_backward if in_backward else made.elsewhere).append(num_bytes)
        return new_buffer(bucket, num_bytes)

    monkeypatch.setattr(Bucket, "new_buffer", counted)
    return made


def backward(model: nn.Module, step: int) -> None:
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
    model(x, step).square().mean().backward()


@pytest.mark.parametrize("allowed", [A_LITTLE, GROWING, ALL], ids=["a little", "growing", "all"])
@pytest.mark.parametrize("bucket_kib", [20, 40], ids=["some alone", "in the ring"])
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_training_is_bitwise_equal(
    name: str, bucket_kib: int, allowed: tuple[StateAhead, ...], keep: Callable[..., OptimizerState]
) -> None:
    """GIVEN a parameter that has no gradient in every second step."""
    early = partial(keep, ahead=allowed, bucket_bytes=bucket_kib * KIB)
    assert are_equal(train(OPTIMIZERS[name]), train(OPTIMIZERS[name], early, begin=1))


@pytest.mark.parametrize("allowed", [A_LITTLE, GROWING, ALL], ids=["a little", "growing", "all"])
@pytest.mark.parametrize("bucket_kib", [20, 40])
def test_as_much_is_read_as_is_allowed_and_no_byte_twice(
    bucket_kib: int,
    allowed: tuple[StateAhead, ...],
    keep: Callable[..., OptimizerState],
    buffers: Buffers,
    state_pool: TransferPool,
) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    state = keep(optimizer, ahead=allowed, bucket_bytes=bucket_kib * KIB)
    sizes = [bucket.num_bytes for bucket in state.buckets]
    read_bytes = state_pool.bytes_read
    backward(model, 0)
    early_bytes, allowed_bytes = sum(buffers.in_backward), allowed[-1].buffer_bytes
    assert 0 < early_bytes <= allowed_bytes
    assert early_bytes >= min(sum(sizes), allowed_bytes - max(sizes) + 1)
    buffers.elsewhere.clear()
    optimizer.step()
    assert state_pool.bytes_read - read_bytes == sum(sizes)
    if allowed is ALL:
        assert buffers.elsewhere == []


@pytest.mark.parametrize(
    ("allowed_kib", "in_backward_kib", "in_step_kib"), [(200, [128, 32, 32], []), (100, [32, 32], [128])]
)
def test_a_large_share_is_read_first_if_that_is_allowed_and_else_stepped_last(
    allowed_kib: int,
    in_backward_kib: list[int],
    in_step_kib: list[int],
    keep: Callable[..., OptimizerState],
    buffers: Buffers,
) -> None:
    """Alone in memory its read would overlap nothing; and beside what was read ahead it would be too much."""
    layers = (nn.Linear(64, 64, bias=False), nn.Linear(64, 256, bias=False), nn.Linear(256, 16, bias=False))
    model = nn.Sequential(*layers)  # with 32, 128 and 32 KiB of state
    optimizer = ADAMW(model.parameters())
    keep(optimizer, ahead=ahead((1, allowed_kib)), bucket_bytes=32 * KIB)
    for _ in range(2):  # the first step makes the state
        model(torch.ones(1, 64)).sum().backward()
        early = list(buffers.in_backward)
        buffers.elsewhere.clear()
        optimizer.step()
    assert early == [num_kib * KIB for num_kib in in_backward_kib]
    assert buffers.elsewhere == [num_kib * KIB for num_kib in in_step_kib]


def test_before_another_forward_it_is_dropped_and_gradients_are_counted_anew(
    keep: Callable[..., OptimizerState], buffers: Buffers
) -> None:
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = ADAMW(model.parameters())
        train_step(model, optimizer, 0)
        state = keep(optimizer, ahead=ahead((NUM_GRADIENTS, 1 << 10))) if is_kept else None
        for step in (2, 4):
            for micro in range(3):
                if state is not None:
                    state.begin_forward()
                buffers.in_backward.clear()
                backward(model, step + 10 * micro)
                assert (len(buffers.in_backward) > 0) == is_kept
            optimizer.step()
            optimizer.zero_grad()
        found.append((model, optimizer.state_dict()))
    assert are_equal(*found)


def test_from_a_gradient_on_that_no_backward_gets_to_nothing_is_read(
    keep: Callable[..., OptimizerState], buffers: Buffers
) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    state = keep(optimizer, ahead=ahead((NUM_GRADIENTS + 1, 1 << 10)))
    for _ in range(3):
        state.begin_forward()
        backward(model, 0)
    assert buffers.in_backward == []


def test_a_session_drops_it_before_a_forward(tmp_path: Path, buffers: Buffers) -> None:
    """GIVEN a loop that evaluates, and one that runs a second backward, between a backward and its step."""
    placement = OptimizerPlacement(tier="disk", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB, ahead=GROWING)
    found = []
    for has_plan in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = ADAMW(model.parameters())

        def loop(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Iterator[list[int]]:
            for step in range(0, 8, 2):
                backward(model, step)
                with torch.no_grad():
                    model(torch.ones(1, 32), step)
                backward(model, step + 20)
                yield list(buffers.in_backward)
                buffers.in_backward.clear()
                optimizer.step()
                optimizer.zero_grad()

        if has_plan:
            with memwall.fit(model, optimizer, plan=plan_of(model, placement), disk=str(tmp_path)):
                read = list(loop())
        else:
            list(loop())
        found.append((model, optimizer.state_dict()))
    assert are_equal(*found)
    for num_bytes in read[1:]:
        half = len(num_bytes) // 2
        assert num_bytes[:half] == num_bytes[half:] != []


@pytest.mark.parametrize("change", ["save", "load", "settle", "undo", "copy"])
def test_between_backward_and_step_everything_works_as_before(change: str, keep: Callable[..., OptimizerState]) -> None:
    found = []
    for is_kept in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = ADAMW(model.parameters())
        train_step(model, optimizer, 0)
        loaded = copy.deepcopy(optimizer.state_dict())
        train_step(model, optimizer, 1)
        state = keep(optimizer, ahead=GROWING) if is_kept else None
        saved: list[Any] = []
        for step in (2, 4):
            backward(model, step)
            if change == "save":
                saved.append(copy.deepcopy(optimizer.state_dict()))
            elif change == "load":
                optimizer.load_state_dict(copy.deepcopy(loaded))
            elif change == "copy":
                saved.append(copy.deepcopy(optimizer).state_dict())
            elif state is not None and change == "settle":
                state.settle(resident_bytes=20 * KIB, bucket_bytes=20 * KIB, ahead=A_LITTLE)
            elif state is not None and step == 2:
                state.undo()
            optimizer.step()
            optimizer.zero_grad()
        found.append((model, [optimizer.state_dict(), *saved]))
    assert are_equal(*found)


def test_a_failing_disk_ends_the_step_and_not_the_backward(tmp_path: Path) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    with TransferPool(ScratchFile(tmp_path, backend=Faulty(on_read=fail)), block_bytes=8 * KIB) as pool:
        state = OptimizerState(
            optimizer, DiskSpace(pool), resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB, ahead=GROWING
        )
        for _ in range(2):
            backward(model, 0)
            assert state.failure is None or _ == 1
            with pytest.raises(OffloadIOError, match=r"bucket \d of the AdamW's state in .* Input/output error"):
                optimizer.step()
        assert isinstance(state.failure, OffloadIOError)


def test_where_the_device_has_no_room_the_step_reads_all(
    keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(ADAMW)
    new_buffer = Bucket.new_buffer

    def full(bucket: Bucket[Any], num_bytes: int) -> BucketBuffer:
        if torch._C._current_autograd_node() is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_buffer(bucket, num_bytes)

    monkeypatch.setattr(Bucket, "new_buffer", full)
    assert are_equal(plain, train(ADAMW, partial(keep, ahead=GROWING)))


def test_after_undo_no_gradient_is_counted(keep: Callable[..., OptimizerState], buffers: Buffers) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    keep(optimizer, ahead=ALL).undo()
    backward(model, 0)
    assert buffers.in_backward == []
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
