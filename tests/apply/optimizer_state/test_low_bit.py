"""Moments in 8 bits, in torchao's form: what they take, torchao's AdamW8bit as oracle, and what surrounds a step."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from optimizer_runs import OPTIMIZERS, Make, Net, in_groups, same, train, train_step
from oracle import count_allocations
from torch import Tensor, nn

from memwall.apply.optimizer_state import low_bit, low_bit_form
from memwall.apply.optimizer_state.low_bit import LowBitMoments, LowBitOptimizerState
from memwall.apply.optimizer_state.low_bit_form import load_torchao
from memwall.errors import ApplyError
from memwall.predict.low_bit_moments import low_bit_bytes
from memwall.session.session import Session

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("one_thread")]
needs_torchao = pytest.mark.requires("torchao")
ADAMS = ["adamw for-loop", "adamw foreach", "adamw fused", "adam amsgrad", "adam foreach maximize"]


def closed(optimizer: torch.optim.Optimizer) -> LowBitOptimizerState:
    return LowBitOptimizerState(LowBitMoments(optimizer))


def moments_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]


def net() -> Net:
    """The same one each time."""
    torch.manual_seed(0)
    return Net()


def distance(one: nn.Module, other: nn.Module) -> float:
    """Of all parameters, as a share of how far they are from zero."""
    a, b = (torch.cat([p.detach().reshape(-1) for p in model.parameters()]) for model in (one, other))
    return float((a - b).norm() / a.norm())


@pytest.fixture(params=[1 << 10, 1 << 20], ids=["several slices", "one slice"])
def slice_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(low_bit, "SLICE_ELEMENTS", request.param)
    return int(request.param)


# What a step computes.


@needs_torchao
@pytest.mark.parametrize("name", ["AdamW8bit", "Adam8bit"])
def test_a_step_is_torchaos_own(name: str, slice_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, which says the same; each step from the same weights and moments as torchao's.

    What is between two codes in one order of roundings may be beyond in another, which the next step would magnify.
    """
    import torchao.optim

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    settings = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    their_model, our_model, start = (net() for _ in range(3))
    theirs = getattr(torchao.optim, name)(in_groups(their_model), **settings)
    ours = getattr(torch.optim, name.removesuffix("8bit"))(in_groups(our_model), **settings)
    closed(ours)
    form = load_torchao()
    for step in range(5):
        train_step(their_model, theirs, step)
        train_step(our_model, ours, step)
        assert distance(their_model, our_model) < 1e-6
        for our, their in zip(our_model.parameters(), their_model.parameters(), strict=True):
            our.data.copy_(their)
            for key in ("exp_avg", "exp_avg_sq"):
                our_moment, their_moment = ours.state[our][key], theirs.state[their][key]
                assert isinstance(our_moment, form) == isinstance(their_moment, form)
                if isinstance(our_moment, form):
                    assert (our_moment.codes != their_moment.codes).float().mean() < 0.005
                    assert torch.allclose(our_moment.scale, their_moment.scale, rtol=1e-4)
                our_moment.copy_(their_moment)
    assert distance(start, our_model) > 1e-2


@needs_torchao
@pytest.mark.parametrize("is_signed", [True, False], ids=["with a sign", "without"])
def test_codes_and_scales_are_those_that_torchao_finds(is_signed: bool) -> None:
    parameter = nn.Parameter(torch.empty(64, 256))
    moments = LowBitMoments(torch.optim.AdamW([parameter]))
    ours, theirs = (moments.new(parameter, "exp_avg" if is_signed else "exp_avg_sq") for _ in range(2))
    table = theirs.qmap
    torch.manual_seed(0)
    values = torch.randn(64, 256) * torch.randn(64, 256).exp() ** 3
    values[0], values[1], values[2], values[3] = 0, -1, 1e-20, table
    values[4], values[5], values[6] = table.flip(0), table.roll(1), 1e30
    values[7, 1:] = (table[1:] + table[:-1]) / 2  # between two codes
    values[7, 0] = 1
    values = values if is_signed else values.abs()
    theirs.copy_(values)
    for begin, end in ((0, 1024), (1024, 64 * 256)):
        moments.write(ours, begin, end, values.view(-1)[begin:end])
    assert torch.equal(ours.codes, theirs.codes)
    assert torch.equal(ours.scale, theirs.scale)
    assert ours.codes.unique().numel() > 250
    assert torch.equal(moments.opened(ours, 1024, 2048), theirs.dequantize().view(-1)[1024:2048])


@needs_torchao
@pytest.mark.parametrize("begin", [0, 2], ids=["from the first step", "from the third step"])
@pytest.mark.parametrize("name", ADAMS)
def test_training_stays_near_that_with_whole_moments(name: str, begin: int, slice_elements: int) -> None:
    plain, _ = train(OPTIMIZERS[name], num_steps=12)
    low, _ = train(OPTIMIZERS[name], closed, begin=begin, num_steps=12)
    start, _ = train(OPTIMIZERS[name], num_steps=0)
    assert 0 < distance(plain, low) < 0.1 * distance(plain, start)


@needs_torchao
@pytest.mark.parametrize("name", ADAMS)
def test_what_stays_whole_is_stepped_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of float32 in place of 8 bits: then all of it is exact."""
    monkeypatch.setattr(LowBitMoments, "new", lambda _, parameter, __: Exact(torch.zeros_like(parameter)))
    monkeypatch.setattr(LowBitMoments, "write", lambda _, moment, *rest: moment.write(*rest))
    monkeypatch.setattr(low_bit, "_part", lambda moment, begin, end: (moment.values.view(-1)[begin:end],))
    monkeypatch.setattr(low_bit, "load_torchao", lambda: Exact)
    monkeypatch.setattr(low_bit, "SLICE_ELEMENTS", 1 << 10)
    plain, plain_state = train(OPTIMIZERS[name])
    low, state = train(OPTIMIZERS[name], closed)
    assert same(dict(plain.named_parameters()), dict(low.named_parameters()))
    assert same({**plain_state, "state": 0}, {**state, "state": 0})


class Exact:
    """Stands in for torchao's form, and loses nothing."""

    signed = dtype = None

    def __init__(self, values: Tensor, *_: object) -> None:
        self.values, self.shape, self.device = values, values.shape, values.device

    def dequantize(self) -> Tensor:
        return self.values.clone()

    def write(self, begin: int, end: int, values: Tensor) -> None:
        self.values.view(-1)[begin:end] = values


# What it takes.


@needs_torchao
def test_a_moment_takes_its_codes_its_scales_and_a_table_and_small_ones_stay_as_they_are() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    train_step(model, optimizer, 0)
    state = closed(optimizer)
    form = load_torchao()
    for parameter, held in optimizer.state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            moment = held[key]
            assert isinstance(moment, form) == (parameter.shape == (64, 64))
            if isinstance(moment, form):
                taken = sum(part.untyped_storage().nbytes() for part in (moment.codes, moment.scale, moment.qmap))
                assert taken == low_bit_bytes(parameter.numel())
    assert state.moments.num_closed == 6


@needs_torchao
@pytest.mark.parametrize("name", ADAMS)
def test_a_step_takes_no_more_than_is_foreseen_for_its_slice(name: str) -> None:
    from memwall.predict.low_bit_moments import _OPEN_BYTES_PER_ELEMENT, SLICE_ELEMENTS

    parameter = nn.Parameter(torch.randn(4 * SLICE_ELEMENTS))
    optimizer = OPTIMIZERS[name]([parameter])
    closed(optimizer)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    count = count_allocations(optimizer.step, [parameter, parameter.grad])
    used = (count.peak_bytes - count.start_bytes) / SLICE_ELEMENTS
    assert 0.75 * _OPEN_BYTES_PER_ELEMENT < used <= _OPEN_BYTES_PER_ELEMENT


# What surrounds the step.


@needs_torchao
def test_a_state_dict_is_as_torch_has_it_and_is_loaded_back(slice_elements: int) -> None:
    model, other = Net(), Net()
    optimizer, second = (torch.optim.AdamW(one.parameters()) for one in (model, other))
    closed(optimizer)
    train_step(model, optimizer, 0)
    saved = optimizer.state_dict()
    assert all(type(v) is Tensor for state in saved["state"].values() for v in state.values())
    pickled = copy.deepcopy(optimizer).state_dict()
    assert same(pickled["state"], saved["state"])
    taken = closed(second)
    second.load_state_dict(saved)
    assert taken.moments.num_closed == 6
    for index, state in second.state_dict()["state"].items():
        for key, value in state.items():
            # Negative codes end at 0.993 of the scale.
            assert torch.allclose(value, saved["state"][index][key], rtol=0.01, atol=1e-12)


@needs_torchao
def test_undone_the_optimizer_goes_on_with_plain_moments() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    state = closed(optimizer)
    for step in range(2):
        train_step(model, optimizer, step)
    opened = optimizer.state_dict()
    state.undo()
    assert all(type(moment) is Tensor for moment in moments_of(optimizer))
    assert same(optimizer.state_dict(), opened)
    assert not optimizer._optimizer_step_pre_hooks
    train_step(model, optimizer, 2)
    assert all(float(held["step"]) >= 2 for held in optimizer.state.values())


@needs_torchao
def test_a_gradient_scaler_leaves_out_the_steps_it_would_leave_out() -> None:
    for name in ("adamw for-loop", "adamw fused"):
        model = Net()
        optimizer = OPTIMIZERS[name](in_groups(model))
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        closed(optimizer)
        for is_finite in (True, False):
            before = copy.deepcopy(dict(model.named_parameters())), optimizer.state_dict()
            loss = model(torch.ones(2, 32), 0).square().mean() * (1.0 if is_finite else float("inf"))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            after = dict(model.named_parameters()), optimizer.state_dict()
            assert same(before, after) != is_finite


# Refusals.


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.SGD, "known for torch.optim's Adam and AdamW, and torch.optim.sgd.SGD steps this model"),
        (partial(torch.optim.Adam, differentiable=True), "so it cannot be in 8 bits; pass differentiable=False"),
    ],
    ids=["SGD", "differentiable"],
)
def test_optimizers_without_such_moments_are_refused_by_name(make: Make, words: str) -> None:
    optimizer = make(Net().parameters())
    with pytest.raises(ApplyError, match=words):
        closed(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bit_form, "find_spec", lambda _: None)
    model = Net()
    for ask in (
        lambda: closed(torch.optim.AdamW(model.parameters())),
        lambda: Session(budget_bytes=1 << 30, allow=("low-bit-optimizer",)),
    ):
        with pytest.raises(ApplyError, match=r"kept by torchao, which is not installed: pip install torchao"):
            ask()
