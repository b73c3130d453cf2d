"""State read while backward runs: the same bits, no more of it than is allowed, and nothing of it without a step."""

import copy
import gc
import os
import time
import weakref
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
from memwall.apply.optimizer_state import on_disk
from memwall.apply.optimizer_state.on_disk import OptimizerState
from memwall.apply.optimizer_state.spaces import DiskSpace
from memwall.apply.streaming.units import hooked_parameters
from memwall.errors import OffloadIOError
from memwall.planning.actions import OptimizerPlacement, StateAhead
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
    """Every buffer that was made, whether it was made while backward ran, and what there was of them at once."""

    def __init__(self) -> None:
        self.in_backward: list[int] = []
        self.elsewhere: list[int] = []
        self.peak_bytes = 0
        self._present: weakref.WeakSet[BucketBuffer] = weakref.WeakSet()

    @property
    def present_bytes(self) -> int:
        """Of those that somebody holds."""
        return sum(buffer.num_bytes for buffer in self._present)

    def add(self, buffer: BucketBuffer) -> None:
        in_backward = torch._C._current_autograd_node() is not None
        (self.in_backward if in_backward else self.elsewhere).append(buffer.num_bytes)
        self._present.add(buffer)
        self.peak_bytes = max(self.peak_bytes, self.present_bytes)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    made, new_buffer = Buffers(), Bucket.new_buffer

    def counted(bucket: Bucket[Any], num_bytes: int) -> BucketBuffer:
        buffer = new_buffer(bucket, num_bytes)
        made.add(buffer)
        return buffer

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
    ("allowed", "in_backward_kib", "in_step_kib", "peak_kib"),
    [
        (ahead((1, 200)), [128, 32, 32], [], 192),
        (ahead((1, 130)), [128], [32, 32], 128),
        (ahead((1, 100)), [32, 32], [128], 128),
        (ahead((1, 70), (3, 200)), [32, 32, 128], [], 192),  # which the others have passed
        (ahead((1, 70), (3, 170)), [32, 128], [32], 160),  # as many as leave room for it
        (ahead((1, 31), (3, 32)), [32], [32, 128], 128),
    ],
)
def test_a_large_share_is_read_first_if_that_is_allowed_and_else_stepped_last(
    allowed: tuple[StateAhead, ...],
    in_backward_kib: list[int],
    in_step_kib: list[int],
    peak_kib: int,
    keep: Callable[..., OptimizerState],
    buffers: Buffers,
) -> None:
    """Alone in memory its read would overlap nothing; and beside what was read ahead it would be too much.

    There is never more of them than the most that may be read ahead or that the optimizer needs, whichever is more.
    """
    layers = (nn.Linear(64, 64, bias=False), nn.Linear(64, 256, bias=False), nn.Linear(256, 16, bias=False))
    model = nn.Sequential(*layers)  # with 32, 128 and 32 KiB of state
    optimizer = ADAMW(model.parameters())
    keep(optimizer, ahead=allowed, bucket_bytes=32 * KIB)
    for _ in range(2):  # the first step makes the state
        model(torch.ones(1, 64)).sum().backward()
        early = list(buffers.in_backward)
        buffers.elsewhere.clear()
        buffers.peak_bytes = 0
        optimizer.step()
        optimizer.zero_grad()
    assert early == [num_kib * KIB for num_kib in in_backward_kib]
    assert buffers.elsewhere == [num_kib * KIB for num_kib in in_step_kib]
    assert max(sum(early), buffers.peak_bytes) == peak_kib * KIB
    assert buffers.present_bytes == 0


def test_what_was_read_for_a_parameter_without_a_gradient_is_freed_before_others_are_stepped(
    keep: Callable[..., OptimizerState], buffers: Buffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False))  # each with 128 KiB of state
    optimizer = ADAMW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    keep(optimizer, ahead=ahead((1, 256)), bucket_bytes=32 * KIB)
    model(torch.ones(1, 64)).sum().backward()
    assert buffers.in_backward == [128 * KIB, 128 * KIB]
    optimizer.param_groups[0]["params"][0].grad = None
    present_bytes, step_some = [], on_disk.step_some

    def noted(optimizer: Any, inner_step: Any, part: Any, arguments: Any) -> None:
        if part:
            present_bytes.append(buffers.present_bytes)
        step_some(optimizer, inner_step, part, arguments)

    monkeypatch.setattr(on_disk, "step_some", noted)
    optimizer.step()
    assert present_bytes == [128 * KIB]


@pytest.mark.parametrize(("after_gradients", "is_read"), [(3, True), (4, False)])
def test_gradients_that_are_views_of_one_storage_count_once_as_a_trace_counts_them(
    after_gradients: int, is_read: bool, keep: Callable[..., OptimizerState], buffers: Buffers
) -> None:
    """GIVEN three weights that are made of eight parameters each."""
    layers = [[nn.Parameter(torch.randn(8, 64)) for _ in range(8)] for _ in range(3)]
    optimizer = ADAMW([part for layer in layers for part in layer])

    def backward() -> None:
        x = torch.ones(4, 64)
        for layer in layers:
            x = nn.functional.linear(x, torch.cat(layer))
        x.sum().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()
    keep(optimizer, ahead=ahead((after_gradients, 1 << 10)))
    backward()
    assert (buffers.in_backward != []) == is_read


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


def test_of_what_is_dropped_hardly_anything_is_read(tmp_path: Path) -> None:
    """GIVEN a slow disk WHEN eight buckets are on their way THEN a forward waits for no more than has begun."""
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)

    def slowly(_: int, fd: int, buffer: memoryview, offset: int) -> int:
        time.sleep(0.05)
        return os.preadv(fd, [buffer], offset)

    slow = ScratchFile(tmp_path, backend=Faulty(on_read=slowly))
    with TransferPool(slow, block_bytes=32 * KIB, num_workers=1) as pool:
        state = OptimizerState(optimizer, DiskSpace(pool), resident_bytes=0, bucket_bytes=1, min_bytes=KIB, ahead=ALL)
        assert len(state.buckets) >= 4
        backward(model, 0)
        state.begin_forward()
        assert pool.bytes_read <= 2 * max(bucket.num_bytes for bucket in state.buckets)
        state.undo()


def test_a_loop_that_never_steps_after_it_is_read_for_in_vain_a_few_times_only(
    keep: Callable[..., OptimizerState], buffers: Buffers
) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    state = keep(optimizer, ahead=ALL)
    for step in range(20):
        backward(model, step)
        state.begin_forward()
        assert (buffers.in_backward != []) == (step < 8)
        buffers.in_backward.clear()
        optimizer.step()


def test_steps_that_are_left_out_now_and_then_change_nothing(
    keep: Callable[..., OptimizerState], buffers: Buffers
) -> None:
    """As a gradient scaler leaves out those whose gradients are infinite."""
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    state = keep(optimizer, ahead=ALL)
    for step in range(20):
        state.begin_forward()
        buffers.in_backward.clear()
        backward(model, step)
        assert buffers.in_backward != []
        if step % 4 == 0:
            optimizer.step()


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


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_where_the_device_has_no_room_the_step_reads_all_from_then_on(
    device: str, keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = train(ADAMW)
    new_buffer, num_failed = Bucket.new_buffer, 0

    def full(bucket: Bucket[Any], num_bytes: int) -> BucketBuffer:
        nonlocal num_failed
        if torch._C._current_autograd_node() is None:
            return new_buffer(bucket, num_bytes)
        num_failed += 1
        if device == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return new_buffer(bucket, 1 << 60)

    monkeypatch.setattr(Bucket, "new_buffer", full)
    assert are_equal(plain, train(ADAMW, partial(keep, ahead=GROWING)))
    assert num_failed == 1


def test_an_error_that_is_none_of_memory_ends_the_backward(
    keep: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    keep(optimizer, ahead=GROWING)

    def broken(*_: object) -> BucketBuffer:
        raise RuntimeError("something else")

    monkeypatch.setattr(Bucket, "new_buffer", broken)
    with pytest.raises(RuntimeError, match="something else"):
        backward(model, 0)


def test_a_state_dict_is_loaded_without_what_was_read_ahead_in_memory(
    keep: Callable[..., OptimizerState], buffers: Buffers
) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    loaded = copy.deepcopy(optimizer.state_dict())
    keep(optimizer, ahead=ALL)
    present_bytes = []
    optimizer.register_load_state_dict_pre_hook(lambda *_: present_bytes.append(buffers.present_bytes))
    backward(model, 0)
    assert buffers.present_bytes > 0
    optimizer.load_state_dict(loaded)
    assert present_bytes == [0]


# Its hooks.


def test_parameters_can_still_be_streamed_whose_gradients_are_counted(keep: Callable[..., OptimizerState]) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    keep(optimizer, ahead=ALL)
    assert all(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert list(hooked_parameters(model)) == []
    handle = next(model.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    assert len(list(hooked_parameters(model))) == 1
    handle.remove()


def test_what_nobody_undid_is_collected_with_its_model(state_pool: TransferPool) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    state = OptimizerState(
        optimizer, DiskSpace(state_pool), resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB, ahead=ALL
    )
    present = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(state)]
    del model, optimizer, state
    gc.collect()
    assert [reference() for reference in present] == [None, None, None]


def test_after_undo_no_gradient_is_counted(keep: Callable[..., OptimizerState], buffers: Buffers) -> None:
    model = Net()
    optimizer = ADAMW(model.parameters())
    train_step(model, optimizer, 0)
    keep(optimizer, ahead=ALL).undo()
    backward(model, 0)
    assert buffers.in_backward == []
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())
