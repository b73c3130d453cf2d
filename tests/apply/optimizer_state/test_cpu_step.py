"""An optimizer's step on the CPU, on a stand-in for CUDA: the bits of torch's fused step on the CPU."""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from late_streams import LateDevice, install
from optimizer_runs import Make, Net, are_equal, in_groups, same, train, train_step
from plans import plan_of

import memwall
from memwall.apply.optimizer_state import open_state
from memwall.apply.optimizer_state.cpu_step import CpuStep
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.errors import ApplyError, StoreError
from memwall.planning.techniques.cpu_step import StepOnCpu

KIB = 1 << 10
CPU = torch.device("cpu")
ORDERS = list(itertools.permutations(("compute", "inward", "outward")))
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]

ACTION = StepOnCpu(bucket_bytes=20 * KIB, min_bytes=KIB)
MAKES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adam": partial(torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True),
    "maximize": partial(torch.optim.Adam, lr=1e-3, maximize=True),
}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """Copies run when somebody waits for them, and not before."""
    made = LateDevice(computes_late=False)
    install(made, monkeypatch)
    return made


@pytest.fixture
def on_cpu(device: LateDevice) -> Iterator[Callable[..., CpuStep]]:
    """Has an optimizer step on the CPU, its few parameters in several buckets."""
    made: list[CpuStep] = []

    def take(optimizer: torch.optim.Optimizer, *, bucket_bytes: int = 20 * KIB) -> CpuStep:
        made.append(CpuStep(optimizer, CPU, bucket_bytes=bucket_bytes, limit_bytes=1 << 30))
        return made[-1]

    yield take
    for step in made:
        step.undo()
    assert not device.registered_bytes


@pytest.mark.parametrize("begin", [0, 2], ids=["from the first step", "later"])
@pytest.mark.parametrize("name", sorted(MAKES))
def test_twenty_steps_are_bitwise_those_of_the_fused_step_on_the_cpu(
    name: str, begin: int, on_cpu: Callable[..., CpuStep]
) -> None:
    make: Make = partial(MAKES[name], fused=True)
    plain = train(make, num_steps=20)
    assert are_equal(plain, train(make, on_cpu, begin=begin, num_steps=20))


def test_an_optimizer_that_is_not_fused_is_stepped_fused_and_stays_what_it_is(on_cpu: Callable[..., CpuStep]) -> None:
    fused, others = (
        train(partial(MAKES["adamw"], **way), keep, num_steps=20)
        for way, keep in (({"fused": True}, None), ({"foreach": True}, on_cpu))
    )
    assert same(dict(fused[0].named_parameters()), dict(others[0].named_parameters()))
    assert same(fused[1]["state"], others[1]["state"])
    assert [(group["fused"], group["foreach"]) for group in others[1]["param_groups"]] == [(None, True)] * 2


@pytest.mark.parametrize("bucket_bytes", [1, 20 * KIB, 1 << 20])
def test_sizes_change_no_bits(bucket_bytes: int, on_cpu: Callable[..., CpuStep]) -> None:
    make: Make = partial(MAKES["adamw"], fused=True)
    kept = train(make, partial(on_cpu, bucket_bytes=bucket_bytes), num_steps=4)
    assert are_equal(train(make, num_steps=4), kept)


def test_every_order_that_the_events_allow_gives_the_same_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [stepped_late(monkeypatch, order, None) for order in ORDERS]
    assert results == [results[0]] * len(ORDERS)


@pytest.mark.parametrize(
    "dropped_wait",
    [
        pytest.param(("outward", "compute"), id="gradients come down before they are there"),
        pytest.param(("outward", "inward"), id="a bucket comes down over one that goes up"),
        pytest.param(("compute", "inward"), id="parameters are used before they are up"),
    ],
)
def test_without_any_one_of_the_waits_some_order_gives_other_parameters(
    dropped_wait: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = stepped_late(monkeypatch, ORDERS[0], None)
    assert any(stepped_late(monkeypatch, order, dropped_wait) != expected for order in ORDERS)


def stepped_late(
    patch: pytest.MonkeyPatch, order: tuple[str, ...], dropped_wait: tuple[str, str] | None
) -> list[float]:
    """Parameters after steps whose gradients are computed late; what they are read into after a step is, too."""
    device = LateDevice(computes_late=True)
    install(device, patch)
    parameters = [torch.full((2 * KIB,), float(number)) for number in range(5)]
    optimizer = torch.optim.AdamW(parameters, lr=0.5, fused=True)
    CpuStep(optimizer, CPU, bucket_bytes=1, limit_bytes=1 << 30)
    device.dropped_wait = dropped_wait
    seen = [torch.zeros(()) for _ in parameters]
    for step in range(3):
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.zeros_like(parameter)
            with device.on(device.compute):
                parameter.grad.add_(1.0 - number - step)
        optimizer.step()
        for parameter, sum_seen in zip(parameters, seen, strict=True):
            with device.on(device.compute):
                sum_seen.add_(parameter[0])
    device.run_all(order)
    return [float(value) for value in (*seen, *(parameter.mean() for parameter in parameters))]


def test_what_is_written_past_autograd_between_steps_counts(on_cpu: Callable[..., CpuStep]) -> None:
    results = []
    for keep in (lambda _: None, on_cpu):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(in_groups(model), fused=True)
        keep(optimizer)
        for step in range(3):
            train_step(model, optimizer, step)
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        results.append((model, optimizer.state_dict()))
    assert are_equal(*results)


def test_state_dicts_copies_and_pickles_are_whole_and_can_be_loaded(on_cpu: Callable[..., CpuStep]) -> None:
    make: Make = partial(MAKES["adamw"], fused=True)
    _, plain = train(make, num_steps=3)
    model = Net()
    optimizer = make(in_groups(model))
    on_cpu(optimizer)
    optimizer.load_state_dict(plain)
    saved = optimizer.state_dict()
    assert same(saved["state"], plain["state"])
    for whole in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert same(whole.state_dict()["state"], saved["state"])
    before = copy.deepcopy(plain["state"])
    train_step(model, optimizer, 3)
    assert same(saved["state"], before)
    assert same(plain["state"], before)
    assert not same(optimizer.state_dict()["state"], plain["state"])


@pytest.mark.parametrize("is_fused", [True, False])
def test_a_gradient_scaler_skips_the_steps_it_would_skip(is_fused: bool, on_cpu: Callable[..., CpuStep]) -> None:
    results = []
    for keep in (lambda _: None, on_cpu):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(in_groups(model), fused=is_fused or keep is not on_cpu)
        keep(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(4):
            loss = model(torch.ones(5, 32), 0).square().mean() * (float("inf") if step == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((model, optimizer.state_dict()["state"]))
    assert are_equal(*results)


def test_what_is_pinned_are_two_buckets_of_parameters_and_gradients(
    on_cpu: Callable[..., CpuStep], device: LateDevice
) -> None:
    parameters = [torch.zeros(8 * KIB, requires_grad=True) for _ in range(6)]
    optimizer = torch.optim.AdamW(parameters)
    step = on_cpu(optimizer, bucket_bytes=64 * KIB)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert sum(device.registered_bytes.values()) == 2 * 2 * 64 * KIB
    assert step.away_bytes == 2 * 6 * 32 * KIB
    assert (step.bytes_written, step.bytes_read) == (2 * 6 * 32 * KIB, 6 * 32 * KIB)


@pytest.mark.parametrize("way", ["the parameter is laid anew", "another order is loaded"])
def test_moments_that_lie_in_another_order_than_their_parameter_are_stepped_as_ever(
    way: str, on_cpu: Callable[..., CpuStep]
) -> None:
    """The step that is not fused asks each tensor for its strides."""
    results = []
    for keep in (lambda _: None, on_cpu):
        torch.manual_seed(0)
        conv = torch.nn.Conv2d(3, 4, 5, bias=False)
        optimizer = torch.optim.AdamW(conv.parameters(), lr=1e-2, foreach=True)
        if way == "the parameter is laid anew":
            keep(optimizer)
        for step in range(4):
            if step == 2:
                saved = optimizer.state_dict()
                conv.to(memory_format=torch.channels_last)
                if way == "another order is loaded":
                    optimizer = torch.optim.AdamW(conv.parameters(), lr=1e-2, foreach=True)
                    keep(optimizer)
                    optimizer.load_state_dict(saved)
            conv(torch.randn(2, 3, 5, 5)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(conv.weight.detach())
    torch.testing.assert_close(*results)


def test_after_a_scaled_step_gradients_are_unscaled_as_a_fused_step_leaves_them(on_cpu: Callable[..., CpuStep]) -> None:
    results = []
    for keep in (lambda _: None, on_cpu):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(in_groups(model), fused=True)
        keep(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=3.0, growth_interval=1)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(5, 32), 0).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            gradients = {str(n): p.grad.clone() for n, p in enumerate(model.parameters()) if p.grad is not None}
            results.append({name: gradient.nan_to_num() for name, gradient in gradients.items()})
    assert all(same(plain, kept) for plain, kept in zip(results[:3], results[3:], strict=True))


def test_empty_parameters_are_stepped_when_only_they_have_gradients(on_cpu: Callable[..., CpuStep]) -> None:
    empty, other = torch.zeros(0, requires_grad=True), torch.ones(3, requires_grad=True)
    optimizer = torch.optim.AdamW([empty, other])
    on_cpu(optimizer)
    empty.grad = torch.zeros(0)
    optimizer.step()
    assert float(optimizer.state[empty]["step"]) == 1
    assert torch.equal(other, torch.ones(3))


def test_a_step_is_possible_after_the_driver_has_refused_to_pin_for_a_larger_one(
    on_cpu: Callable[..., CpuStep], device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = (torch.zeros(size, requires_grad=True) for size in (KIB, 64 * KIB))
    optimizer = torch.optim.AdamW([small, large])
    on_cpu(optimizer)
    small.grad = torch.ones_like(small)
    optimizer.step()
    large.grad = torch.ones_like(large)
    with monkeypatch.context() as patch:
        patch.setattr(device, "cudaHostRegister", lambda *_: 1)
        with pytest.raises(StoreError, match="refuses to pin"):
            optimizer.step()
    large.grad = None
    optimizer.step()
    assert float(optimizer.state[small]["step"]) == 2


def test_host_memory_must_have_room_for_the_state_and_what_passes_through(device: LateDevice) -> None:
    parameter = torch.zeros(64 * KIB, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter], amsgrad=True)
    for number in range(2):  # before there is state, and once there is
        with pytest.raises(
            StoreError, match=r"room for 768\.0 KiB of state and 1\.0 MiB that pass through, and 1\.0 KiB"
        ):
            CpuStep(optimizer, CPU, bucket_bytes=KIB, limit_bytes=KIB)
        if number == 0:
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()


def test_tensors_that_were_moved_or_converted_are_refused(on_cpu: Callable[..., CpuStep]) -> None:
    parameter = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.AdamW([parameter])
    on_cpu(optimizer)
    parameter.grad = torch.ones(4)
    optimizer.step()
    moments = optimizer.state[parameter]
    moments["exp_avg"] = moments["exp_avg"].to("meta")
    with pytest.raises(ApplyError, match="and its 'exp_avg' is on meta; leave its state as it is"):
        optimizer.step()
    moments["exp_avg"] = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(ApplyError, match=r"is in torch\.bfloat16, not in its parameter's torch\.float32; leave"):
        optimizer.step()
    moments["exp_avg"] = torch.zeros(4)
    optimizer.add_param_group({"params": [torch.zeros(4, device="meta")]})
    with pytest.raises(ApplyError, match="on the CPU, and a parameter is on meta, not on cpu; plan without"):
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "only Adam and AdamW are stepped there"),
        (partial(torch.optim.AdamW, capturable=True), "a capturable one counts its steps on the device"),
        (
            lambda _: torch.optim.AdamW([torch.zeros(4, dtype=torch.float16)]),
            r"a parameter is in torch\.float16, not in float32 or bfloat16",
        ),
        (lambda _: torch.optim.AdamW([torch.zeros(4, 4)[:, :2]]), "a parameter lies in memory with gaps"),
    ],
    ids=["sgd", "capturable", "float16", "gaps"],
)
def test_what_the_cpu_cannot_step_is_refused_in_one_line(make: Any, found: str, device: LateDevice) -> None:
    optimizer = make([torch.zeros(4)])
    with pytest.raises(ApplyError, match=f"on the CPU, and {found}; plan without --allow cpu-optimizer-step"):
        CpuStep(optimizer, CPU, bucket_bytes=KIB, limit_bytes=1 << 20)


def test_a_step_in_a_captured_graph_is_refused(on_cpu: Callable[..., CpuStep], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    on_cpu(optimizer)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(StoreError, match="captured into a CUDA graph"):
        train_step(model, optimizer, 1)


# Under a plan.


def step_on_cpu(keeper: StateKeeper, optimizer: torch.optim.Optimizer, bucket_bytes: int) -> None:
    keeper.step_on_cpu(optimizer, bucket_bytes=bucket_bytes, host_limit_bytes=1 << 30)


def test_a_plans_state_is_placed_and_brought_back_between_steps(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_state, "_device_above_host", lambda _: CPU)
    make: Make = partial(MAKES["adamw"], fused=True)
    torch.manual_seed(0)
    model = Net()
    optimizer = make(in_groups(model))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    keeper = StateKeeper(None, None)
    for step in range(4):
        if step == 1:
            step_on_cpu(keeper, optimizer, ACTION.bucket_bytes)
        if step == 3:
            assert keeper.is_away
            assert keeper.away_bytes > 0
            assert min(keeper.moved_bytes()) > 0
            keeper.bring_back()
        train_step(model, optimizer, step)
        scheduler.step()
    assert not keeper.is_away
    assert not device.registered_bytes
    assert are_equal(train(make, num_steps=4), (model, optimizer.state_dict()))


def test_a_plan_that_takes_the_place_of_another_leaves_state_in_host_memory(
    device: LateDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_state, "_device_above_host", lambda _: CPU)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    keeper = StateKeeper(None, None)
    step_on_cpu(keeper, optimizer, ACTION.bucket_bytes)
    train_step(model, optimizer, 0)
    before = {parameter: state["exp_avg"].data_ptr() for parameter, state in optimizer.state.items()}
    pinned_bytes = sum(device.registered_bytes.values())
    step_on_cpu(keeper, optimizer, 1 << 20)
    train_step(model, optimizer, 1)
    assert {parameter: state["exp_avg"].data_ptr() for parameter, state in optimizer.state.items()} == before
    assert sum(device.registered_bytes.values()) > pinned_bytes
    keeper.bring_back()
    assert not device.registered_bytes


def test_parameters_that_are_on_the_cpu_already_are_refused() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        pytest.raises(ApplyError, match=r"AdamW's state in host memory, and its parameters are on cpu"),
        memwall.fit(model, optimizer, plan=plan_of(model, ACTION)),
    ):
        train_step(model, optimizer, 0)
