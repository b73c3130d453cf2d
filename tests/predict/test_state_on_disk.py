"""A step with its optimizer's state on disk: what of it is in memory when, to the byte."""

from collections.abc import Callable
from functools import partial

import msgspec
import pytest
import torch
from torch import Tensor, nn

from memwall.predict.curve import live_curve
from memwall.predict.state_on_disk import (
    NUM_BUFFERS,
    before_optimizer,
    buffer_sizes,
    movable_state_bytes,
    state_sizes,
    with_state_on_disk,
)
from memwall.trace.records import Step
from memwall.trace.steps import steady_step
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

KIB = 1 << 10
MIN_BYTES = KIB
# Two layers of 64 x 64, one of 64 x 16, biases below MIN_BYTES.
MATRIX_BYTES, LAST_BYTES = 16 * KIB, 4 * KIB
pytestmark = pytest.mark.usefixtures("one_thread")


def steady(make: Callable[..., torch.optim.Optimizer]) -> Step:
    """The steady step of a perceptron."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch)
        return out.square().mean()

    return steady_step(record(Workload(model=model, batch=lambda: torch.ones(4, 64), loss=loss, optimizer=make)))


ADAMW = partial(torch.optim.AdamW, foreach=False)


@pytest.mark.parametrize(
    ("make", "tensors"),
    [(ADAMW, 2), (partial(ADAMW, amsgrad=True), 3), (partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1)],
    ids=["adamw", "amsgrad", "momentum"],
)
def test_state_is_counted_by_tensor_and_by_parameter(make: Callable[..., torch.optim.Optimizer], tensors: int) -> None:
    step = steady(make)
    assert movable_state_bytes(step, MIN_BYTES) == tensors * (2 * MATRIX_BYTES + LAST_BYTES)
    assert state_sizes(step, MIN_BYTES) == (tensors * LAST_BYTES, tensors * MATRIX_BYTES, tensors * MATRIX_BYTES)
    assert movable_state_bytes(step, 8 * KIB) == tensors * 2 * MATRIX_BYTES


def test_without_state_there_is_nothing_to_move() -> None:
    step = steady(partial(torch.optim.SGD, lr=0.1))
    assert movable_state_bytes(step, MIN_BYTES) == 0
    assert state_sizes(step, MIN_BYTES) == ()
    assert with_state_on_disk(step, resident_bytes=0, bucket_bytes=KIB, min_bytes=MIN_BYTES) is step


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "buffers"),
    [
        ((), 100, ()),
        ((4096,), 8192, (4096,)),
        ((4096, 4096), 8192, (8192,)),
        ((4096,) * 3, 8192, (8192, 8192)),
        ((4096,) * 99, 8192, (8192,) * NUM_BUFFERS),
        ((8192,) * 4, 4096, (8192,)),
        ((4096,) * 9 + (100_000,), 4096, (102_400,)),
        ((4096,) * 9 + (8192,), 4096, (4096,) * NUM_BUFFERS),
    ],
    ids=[
        "nothing",
        "one",
        "one bucket",
        "two buckets",
        "many buckets",
        "each larger than a bucket, one at a time",
        "one larger than all buffers",
        "one smaller than all buffers",
    ],
)
def test_buffers_hold_a_bucket_each_or_one_parameter_that_is_larger(
    sizes: tuple[int, ...], bucket_bytes: int, buffers: tuple[int, ...]
) -> None:
    assert tuple(b for b in buffer_sizes(sizes, bucket_bytes) if b) == buffers


def test_what_stays_is_the_resident_part_and_in_the_optimizer_its_buffers_besides() -> None:
    step = steady(ADAMW)
    bucket_bytes, resident_bytes = 32 * KIB, 12 * KIB
    treated = with_state_on_disk(step, resident_bytes=resident_bytes, bucket_bytes=bucket_bytes, min_bytes=MIN_BYTES)
    change = live_curve(treated.storages, len(treated.ops)) - live_curve(step.storages, len(step.ops))
    state_bytes = movable_state_bytes(step, MIN_BYTES)
    phases = [op.phase for op in step.ops]
    outside = [change[n] for n, phase in enumerate(phases) if phase != "optimizer"]
    inside = [change[n] for n, phase in enumerate(phases) if phase == "optimizer"]
    assert len(inside) > 10
    assert set(outside) == {resident_bytes - state_bytes}
    assert set(inside) == {resident_bytes - state_bytes + 3 * (bucket_bytes + 4096)}
    assert treated.ops is step.ops
    assert [s.birth for s in treated.storages[: len(step.storages)]] == [s.birth for s in step.storages]


def test_a_device_keeps_each_resident_tensor_in_a_block_of_its_own() -> None:
    step = steady(ADAMW)
    there = tuple(msgspec.structs.replace(storage, device="cuda") for storage in step.storages)
    resident_bytes = 2 * MATRIX_BYTES + LAST_BYTES
    found = with_state_on_disk(
        msgspec.structs.replace(step, storages=there),
        resident_bytes=resident_bytes,
        bucket_bytes=MATRIX_BYTES,
        min_bytes=MIN_BYTES,
    )
    standing = [s.nbytes for s in found.storages[len(step.storages) :] if s.birth < 0]
    assert sorted(standing) == [LAST_BYTES, MATRIX_BYTES, MATRIX_BYTES]


def test_a_device_hands_out_what_its_fullest_bucket_takes() -> None:
    """GIVEN buckets that whole parameters do not fill WHEN state passes through THEN each buffer is as the fullest."""
    step = steady(ADAMW)
    there = tuple(msgspec.structs.replace(storage, device="cuda") for storage in step.storages)
    on_device = msgspec.structs.replace(step, storages=there)

    def buffers(resident_bytes: int) -> list[int]:
        found = with_state_on_disk(
            on_device, resident_bytes=resident_bytes, bucket_bytes=3 * MATRIX_BYTES, min_bytes=MIN_BYTES
        )
        return [s.nbytes - 4096 for s in found.storages[len(step.storages) :] if s.birth >= 0]

    assert buffers(0) == [2 * MATRIX_BYTES + 2 * LAST_BYTES] * 2  # the third parameter lies beside the second
    assert buffers(2 * MATRIX_BYTES) == [2 * MATRIX_BYTES + 2 * LAST_BYTES]


def test_until_the_optimizer_runs_state_on_disk_is_nowhere_in_memory() -> None:
    step = steady(ADAMW)
    before = before_optimizer(step, MIN_BYTES)
    assert "optimizer" not in {op.phase for op in before.ops}
    assert step.ops[len(before.ops)].phase == "optimizer"
    change = live_curve(before.storages, len(before.ops)) - live_curve(step.storages, len(step.ops))[: len(before.ops)]
    assert set(change) == {-movable_state_bytes(step, MIN_BYTES)}
    assert all(s.birth < len(before.ops) for s in before.storages if s.nbytes)


def test_with_all_of_it_resident_the_step_is_as_it_was() -> None:
    step = steady(ADAMW)
    state_bytes = movable_state_bytes(step, MIN_BYTES)
    assert with_state_on_disk(step, resident_bytes=state_bytes, bucket_bytes=KIB, min_bytes=MIN_BYTES) is step
