"""Optimizer state in pinned host memory, on a stand-in for CUDA: the same bits in every order that its events allow."""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from combinations import every_value
from late_streams import LateDevice, install
from optimizer_runs import OPTIMIZERS, Net, are_equal, in_groups, resident_state_bytes, same, train, train_step
from plans import plan_of
from torch import Tensor

import memwall
from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.pinned import PinnedBucket, PinnedSpace
from memwall.apply.optimizer_state.ring import step_through
from memwall.apply.optimizer_state.shares import StateShare
from memwall.errors import ApplyError, StoreError
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.predict.state_on_disk import NUM_BUFFERS
from memwall.store.buckets import BucketBuffer

KIB = 1 << 10
CPU = torch.device("cpu")
STREAMS = ("compute", "inward", "outward")
FEW, MANY = NUM_BUFFERS, 2 * NUM_BUFFERS + 1
"""Shares: as many as there are buffers, and more."""
NUM_STEPS = 3
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]


# The order of copies and steps.


def state_after(
    patch: pytest.MonkeyPatch,
    num_shares: int,
    order: tuple[str, ...],
    dropped_wait: tuple[str, str] | None,
) -> list[float]:
    """What a few steps that add one each have added to each share's state, with waits forgotten or not."""
    device = LateDevice(computes_late=True)
    install(device, patch)
    space = PinnedSpace(CPU, limit_bytes=1 << 20)
    states = [{"momentum": torch.full((2 * KIB,), float(100 * number))} for number in range(num_shares)]
    shares = [StateShare(space.bucket("")) for _ in states]
    holder_of = dict(zip(shares, states, strict=True))
    for share, state in holder_of.items():
        share.bucket.put_away([(state, "momentum")], None)
        device.run_all(STREAMS)
    device.dropped_wait = dropped_wait

    def step(share: StateShare) -> None:
        with device.on(device.compute):
            holder_of[share]["momentum"].add_(1)

    for _ in range(NUM_STEPS):
        step_through(shares, step, lambda share: [(holder_of[share], "momentum")], ring_bytes=1 << 20)
    device.run_all(order)
    device.dropped_wait = None
    found = []
    for share, state in holder_of.items():
        copies = share.bucket.new_buffer(share.bucket.num_bytes)
        share.bucket.begin_read(copies)
        share.bucket.finish_read(copies)
        device.run_all(STREAMS)
        found.append(state["momentum"].mean().item() - 100 * len(found))
    return found


@pytest.mark.parametrize("num_shares", [1, FEW, MANY])
@pytest.mark.parametrize("order", list(itertools.permutations(STREAMS)), ids="-".join)
def test_every_order_that_the_events_allow_gives_the_same_state(
    num_shares: int, order: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state_after(monkeypatch, num_shares, order, None) == [NUM_STEPS] * num_shares


@pytest.mark.parametrize(
    "dropped_wait",
    [
        pytest.param(("inward", "compute"), id="a read before what used its memory"),
        pytest.param(("inward", "outward"), id="a read into a buffer that is being written"),
        pytest.param(("compute", "inward"), id="a step before its state is there"),
        pytest.param(("outward", "compute"), id="a write before the step"),
        pytest.param(("compute", "outward"), id="the next step before the last write"),
    ],
)
def test_without_any_one_of_the_waits_some_order_gives_another_state(
    dropped_wait: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [
        state_after(monkeypatch, num_shares, order, dropped_wait)
        for num_shares in (FEW, MANY)
        for order in itertools.permutations(STREAMS)
    ]
    assert any(set(added) != {NUM_STEPS} for added in found)


def test_buffers_are_freed_after_the_reads_of_a_step_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = LateDevice(computes_late=True)
    install(device, monkeypatch)
    space = PinnedSpace(CPU, limit_bytes=1 << 20)
    states = [{"momentum": torch.zeros(2 * KIB)} for _ in range(MANY)]
    shares = [StateShare(space.bucket("")) for _ in states]
    holder_of = dict(zip(shares, states, strict=True))
    for share, state in holder_of.items():
        share.bucket.put_away([(state, "momentum")], None)

    def failing(_: StateShare) -> None:
        raise RuntimeError("no such kernel")

    with pytest.raises(RuntimeError, match="no such kernel"):
        step_through(shares, failing, lambda share: [(holder_of[share], "momentum")], ring_bytes=1 << 20)
    device.run_until(device.compute.record_event())
    assert [stream.next_item for stream in device.streams] == [None, None, None]
    assert all(state["momentum"].is_meta for state in states)


# An optimizer.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Copies run when somebody waits for them, and not before."""
    made = LateDevice(computes_late=False)
    install(made, monkeypatch)
    return made


@pytest.fixture
def space(device: LateDevice) -> Iterator[PinnedSpace]:
    made = PinnedSpace(CPU, limit_bytes=1 << 30)
    yield made
    made.close()
    assert not device.registered_bytes


@pytest.fixture
def keep_pinned(space: PinnedSpace) -> Callable[..., OptimizerState]:
    """Puts an optimizer's state into host memory; almost every tensor of a small model moves."""

    def put(optimizer: torch.optim.Optimizer, **settings: Any) -> OptimizerState:
        chosen = {"resident_bytes": 0, "bucket_bytes": 40 * KIB, "min_bytes": KIB} | settings
        return OptimizerState(optimizer, space, **chosen)

    return put


@pytest.mark.parametrize(("name", "begin"), every_value(sorted(OPTIMIZERS), {"from the first step": 0, "later": 2}))
def test_training_is_bitwise_equal(name: str, begin: int, keep_pinned: Callable[..., OptimizerState]) -> None:
    make = OPTIMIZERS[name]
    assert are_equal(train(make, num_steps=4), train(make, keep_pinned, begin=begin, num_steps=4))


@pytest.mark.parametrize("bucket_bytes", [1, 40 * KIB, 1 << 20])
@pytest.mark.parametrize("resident_bytes", [0, 50 * KIB])
def test_sizes_change_no_bits(
    bucket_bytes: int, resident_bytes: int, keep_pinned: Callable[..., OptimizerState]
) -> None:
    make = OPTIMIZERS["adamw foreach"]

    def keep(optimizer: torch.optim.Optimizer) -> None:
        keep_pinned(optimizer, bucket_bytes=bucket_bytes, resident_bytes=resident_bytes)

    assert are_equal(train(make, num_steps=4), train(make, keep, num_steps=4))


@pytest.mark.parametrize("begin", [0, 2], ids=["made in the ring", "there before"])
def test_what_is_pinned_is_the_state_in_whole_pages(
    begin: int, keep_pinned: Callable[..., OptimizerState], space: PinnedSpace, device: LateDevice
) -> None:
    kept: list[OptimizerState] = []
    train(OPTIMIZERS["sgd for-loop"], lambda optimizer: kept.append(keep_pinned(optimizer)), begin=begin, num_steps=4)
    (state,) = kept
    assert sum(device.registered_bytes.values()) == space.pinned_bytes == state.away_bytes
    assert resident_state_bytes(state.optimizer) == 0
    state.settle(resident_bytes=0, bucket_bytes=80 * KIB)
    assert sum(device.registered_bytes.values()) == state.away_bytes
    state.undo()
    assert not device.registered_bytes
    assert resident_state_bytes(state.optimizer) > 0


def test_state_that_a_step_has_made_leaves_without_a_copy_on_the_device(
    keep_pinned: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[int] = []
    new_buffer = PinnedBucket.new_buffer

    def counted(bucket: PinnedBucket, num_bytes: int) -> BucketBuffer:
        buffers.append(num_bytes)
        return new_buffer(bucket, num_bytes)

    monkeypatch.setattr(PinnedBucket, "new_buffer", counted)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = keep_pinned(optimizer)
    train_step(model, optimizer, 0)
    assert state.away_bytes > 0
    assert buffers == []
    train_step(model, optimizer, 2)
    assert len(buffers) == NUM_BUFFERS


def test_state_dicts_copies_and_pickles_are_whole_and_can_be_loaded(
    keep_pinned: Callable[..., OptimizerState],
) -> None:
    make = OPTIMIZERS["adamw for-loop"]
    plain_model, plain = train(make, num_steps=3)
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    keep_pinned(optimizer)
    for step in range(3):
        train_step(model, optimizer, step)
    scheduled = [group["lr"] for group in plain["param_groups"]]
    assert scheduled
    saved = optimizer.state_dict()
    for whole in (saved, copy.deepcopy(optimizer).state_dict(), pickle.loads(pickle.dumps(optimizer)).state_dict()):
        assert same(whole["state"], saved["state"])
        assert all(not v.is_meta for state in whole["state"].values() for v in state.values() if isinstance(v, Tensor))
    optimizer.load_state_dict(plain)
    assert resident_state_bytes(optimizer) == 0
    assert same(optimizer.state_dict()["state"], plain["state"])
    assert isinstance(plain_model, Net)


def test_a_step_counter_on_the_device_stays_there(keep_pinned: Callable[..., OptimizerState]) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    keep_pinned(optimizer)
    train_step(model, optimizer, 0)
    states = list(optimizer.state.values())
    assert {float(state["step"]) for state in states} == {1.0}
    assert any(state["exp_avg"].is_meta for state in states)


def test_a_gradient_scaler_skips_the_steps_it_would_skip(keep_pinned: Callable[..., OptimizerState]) -> None:
    results = []
    for keep in (lambda _: None, keep_pinned):
        torch.manual_seed(0)
        model = Net()
        optimizer = OPTIMIZERS["adamw for-loop"](in_groups(model))
        keep(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            loss = model(torch.ones(5, 32), 0).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((model, optimizer.state_dict()))
    assert are_equal(*results)


# Limits.


def test_what_the_device_has_no_room_for_at_the_end_is_in_the_hosts_memory(
    keep_pinned: Callable[..., OptimizerState],
    device: LateDevice,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = keep_pinned(optimizer)
    train_step(model, optimizer, 0)
    expected = optimizer.state_dict()
    copies, asked = PinnedBucket.copies, []

    def full(bucket: PinnedBucket, where: torch.device | None = None) -> dict[int, Tensor]:
        asked.append(where)
        if where is None and len(asked) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copies(bucket, where)

    monkeypatch.setattr(PinnedBucket, "copies", full)
    state.undo()
    assert asked[:3] == [None, None, CPU]
    assert same(optimizer.state_dict()["state"], expected["state"])
    assert not device.registered_bytes
    assert "has no room for" in caplog.text


def test_more_than_the_host_has_is_refused_before_anything_moves(device: LateDevice) -> None:
    model, plain = train(OPTIMIZERS["adamw for-loop"], num_steps=2)
    optimizer = OPTIMIZERS["adamw for-loop"](in_groups(model))
    optimizer.load_state_dict(plain)
    space = PinnedSpace(CPU, limit_bytes=64 * KIB)
    with pytest.raises(StoreError, match=r"needs .* of pinned host memory, and 64\.0 KiB can be had"):
        OptimizerState(optimizer, space, resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB)
    assert not device.registered_bytes
    assert same(optimizer.state_dict()["state"], plain["state"])


def test_a_driver_that_pins_no_more_leaves_the_state_as_it_was(
    device: LateDevice, space: PinnedSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = train(OPTIMIZERS["adamw for-loop"], num_steps=2)
    optimizer = OPTIMIZERS["adamw for-loop"](in_groups(model))
    optimizer.load_state_dict(plain)
    register = device.cudaHostRegister
    monkeypatch.setattr(device, "cudaHostRegister", lambda *a: 2 if device.registered_bytes else register(*a))
    with pytest.raises(StoreError, match=r"refuses to pin .* \(error 2\) .* locked-memory limit"):
        OptimizerState(optimizer, space, resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB)
    assert same(optimizer.state_dict()["state"], plain["state"])


def test_a_step_in_a_captured_graph_is_refused(
    keep_pinned: Callable[..., OptimizerState], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    keep_pinned(optimizer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StoreError, match="captured into a CUDA graph"):
        train_step(model, optimizer, 1)


def test_without_an_accelerator_a_plan_that_pins_is_refused() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    action = OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=40 * KIB, min_bytes=KIB)
    with (
        pytest.raises(
            ApplyError, match=r"AdamW's state in host memory, and its parameters are on cpu, which pins none"
        ),
        memwall.fit(model, optimizer, plan=plan_of(model, action)),
    ):
        train_step(model, optimizer, 0)
