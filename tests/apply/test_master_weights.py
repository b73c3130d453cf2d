"""Float32 master weights: what a loop written by hand with float32 copies gives, wherever the state is."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Script, run
from combinations import every_value
from lion_pytorch import Lion
from optimizer_runs import Net, are_equal, in_groups, same
from placed_runs import PARAMETERS, STATE, differing
from plans import plan_of
from streamed_models import GPT, loss_of
from torch import Tensor, nn

import memwall
from memwall.apply.optimizer_state.bucketed_state import OptimizerState
from memwall.apply.optimizer_state.low_bit import LowBitMoments
from memwall.apply.optimizer_state.master_weights import MASTER, with_master_weights
from memwall.apply.optimizer_state.open_state import open_optimizer_state
from memwall.apply.optimizer_state.partial_step import inner_step_of
from memwall.apply.optimizer_state.shares import expected_state_bytes
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import ApplyError
from memwall.predict.state_on_disk import state_sizes
from memwall.trace.steps import steady_step

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-3}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
    "Adam amsgrad": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1}),
    "Lion": (Lion, {"lr": 1e-4}),
}
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(60)]


def made(dtype: torch.dtype) -> Net:
    """Its norm stays in float32."""
    torch.manual_seed(0)
    net = Net().to(dtype)
    net.norm.float()
    net.norm.register_forward_pre_hook(lambda _, given: (given[0].float(),))
    net.norm.register_forward_hook(lambda _, __, out: out.to(dtype))
    return net


def backward(net: nn.Module, step: int, dtype: torch.dtype) -> None:
    """Two micro-batches, clipped."""
    for micro in range(2):
        x = torch.randn(5, 32, generator=torch.Generator().manual_seed(100 * step + micro)).to(dtype)
        (net(x, step).float().square().mean() / 2).backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def by_hand(kind: type[torch.optim.Optimizer], options: dict[str, Any], dtype: torch.dtype) -> tuple[Net, Any]:
    """The loop that people write: a float32 copy of each parameter, which the optimizer has in its place."""
    net = made(dtype)
    copies = {p: p.detach().float().clone() if p.dtype == dtype else p for p in net.parameters()}
    groups = [{**group, "params": [copies[p] for p in group["params"]]} for group in in_groups(net)]
    optimizer = kind(groups, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(20):
        backward(net, step, dtype)
        for parameter, whole in copies.items():
            whole.grad = None if parameter.grad is None else parameter.grad.to(whole.dtype)
        optimizer.step()
        scheduler.step()
        with torch.no_grad():
            for parameter, whole in copies.items():
                parameter.copy_(whole)
        net.zero_grad()
    return net, {name: copies[p] for name, p in net.named_parameters()}


def with_masters(
    kind: type[torch.optim.Optimizer],
    options: dict[str, Any],
    dtype: torch.dtype,
    keep: Callable[[torch.optim.Optimizer], object] = lambda _: None,
    between: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda optimizer: optimizer,
) -> tuple[Net, torch.optim.Optimizer]:
    net = made(dtype)
    optimizer = with_master_weights(kind)(in_groups(net), **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    keep(optimizer)
    for step in range(20):
        if step == 10:
            optimizer = between(optimizer)
            scheduler.optimizer = optimizer
        backward(net, step, dtype)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return net, optimizer


def masters(net: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """By name; of float32 parameters these themselves."""
    state = optimizer.state_dict()["state"]
    names = {id(p): name for name, p in net.named_parameters()}
    members = [p for group in optimizer.param_groups for p in group["params"]]
    found = {names[id(p)]: state[number].get(MASTER, p) for number, p in enumerate(members)}
    return {name: found[name].detach() for name, _ in net.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), every_value(list(KINDS), {"bfloat16": torch.bfloat16, "float16": torch.float16})
)
def test_twenty_steps_are_those_of_a_loop_with_float32_copies(
    name: str, dtype: torch.dtype, keep: Callable[..., OptimizerState]
) -> None:
    """GIVEN two groups, accumulation, clipping, a schedule, and a float32 norm in a model of less precision."""
    kind, options = KINDS[name]
    net, expected = by_hand(kind, options, dtype)
    for where in (lambda _: None, partial(keep, bucket_bytes=1)):
        found, optimizer = with_masters(kind, options, dtype, where)
        assert same(found.state_dict(), net.state_dict())
        assert same(masters(found, optimizer), expected)
    assert optimizer.state[found.first.weight][MASTER].is_meta  # on disk between steps


def test_small_updates_add_up_that_a_low_precision_parameter_loses() -> None:
    for kind, expected in ((torch.optim.SGD, 1.0), (with_master_weights(torch.optim.SGD), 1.0 - 2**-6)):
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = kind([parameter], lr=2**-12)
        for _ in range(64):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        assert parameter.tolist() == [expected] * 4


def test_what_somebody_else_writes_into_a_parameter_is_its_masters_from_then_on() -> None:
    parameter = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    optimizer = with_master_weights(torch.optim.SGD)([parameter], lr=2**-12)
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    with torch.no_grad():
        parameter[0] = 5.0
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert optimizer.state[parameter][MASTER].tolist() == [5.0, 2.0 - 3 * 2**-12]


# Saved and loaded.


@pytest.mark.parametrize("is_kept", [False, True], ids=["in memory", "on disk"])
def test_a_state_dict_is_loaded_without_rounding(is_kept: bool, keep: Callable[..., OptimizerState]) -> None:
    kind, options = KINDS["AdamW"]

    def another(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        saved = copy.deepcopy(optimizer.state_dict())
        made = with_master_weights(kind)(in_groups_of(optimizer), **options)
        if is_kept:
            keep(made)
        made.load_state_dict(saved)
        large = made.param_groups[0]["params"][0]
        assert made.state[large][MASTER].is_meta == is_kept
        assert same(made.state_dict()["state"], saved["state"])
        return made

    whole = with_masters(kind, options, torch.bfloat16)
    loaded = with_masters(kind, options, torch.bfloat16, between=another)
    assert are_equal((whole[0], whole[1].state_dict()["state"]), (loaded[0], loaded[1].state_dict()["state"]))


def in_groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{"params": group["params"]} for group in optimizer.param_groups]


def test_state_of_an_optimizer_without_masters_goes_on_in_float32() -> None:
    net = made(torch.bfloat16)
    plain = torch.optim.AdamW(net.parameters())
    backward(net, 0, torch.bfloat16)
    plain.step()
    optimizer = with_master_weights(torch.optim.AdamW)(net.parameters())
    optimizer.load_state_dict(plain.state_dict())
    optimizer.step()
    state = optimizer.state[net.first.weight]
    assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq", MASTER)] == [torch.float32] * 3


def test_hooks_around_loading_change_and_see_what_is_loaded() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = with_master_weights(torch.optim.SGD)([parameter], lr=2**-12, momentum=0.9)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def halved(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        state = {number: {key: value / 2 for key, value in each.items()} for number, each in given["state"].items()}
        return {**given, "state": state}

    seen: list[float] = []
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[parameter][MASTER][0].item()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[parameter]["momentum_buffer"].tolist() == [0.5] * 4
    assert seen == [(1 - 2**-12) / 2]


def test_a_copy_and_a_pickle_have_them(keep: Callable[..., OptimizerState]) -> None:
    _, optimizer = with_masters(torch.optim.AdamW, {"lr": 1e-3}, torch.bfloat16)
    keep(optimizer)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is type(optimizer)
        assert same(list(twin.state_dict()["state"].values()), list(optimizer.state_dict()["state"].values()))


class WithMasters(Script):
    """In bfloat16; its state in memory, or on disk as under a plan."""

    is_kept = False

    def __init__(self, **options: Any) -> None:
        super().__init__(partial(with_master_weights(torch.optim.AdamW), lr=1e-2), **options)
        self.model.to(torch.bfloat16)
        self.model.register_forward_pre_hook(lambda _, given: (given[0].bfloat16(),))
        self.model.register_forward_hook(lambda _, __, out: out.float())

    def train(self) -> None:
        if not self.is_kept:
            super().train()
            return
        sizes = {"resident_bytes": 100, "bucket_bytes": 256, "min_bytes": 64}
        _, close = open_optimizer_state(self.optimizer, disk=None, capacity_bytes=None, **sizes)
        try:
            super().train()
        finally:
            close()


class WithMastersOnDisk(WithMasters):
    is_kept = True


@pytest.mark.slow
@pytest.mark.parametrize("script", [WithMasters, WithMastersOnDisk])
def test_a_run_that_is_resumed_ends_with_the_same_bits(script: type[WithMasters], tmp_path: Path) -> None:
    plain = run(WithMasters)
    run(lambda: script(stop_in=3), StepCheckpoint(tmp_path))
    resumed = run(script, StepCheckpoint(tmp_path, is_resuming=True))
    assert are_equal(plain.result, resumed.result)
    assert resumed.optimizer.state[resumed.model.first.weight][MASTER].dtype == torch.float32


# Under memwall.


def test_parameters_and_masters_on_disk_train_to_the_same_bits(tmp_path: Path) -> None:
    def trained(is_placed: bool) -> tuple[GPT, Any]:
        torch.manual_seed(0)
        model = GPT().to(torch.bfloat16)
        optimizer = with_master_weights(torch.optim.AdamW)(model.parameters(), lr=1e-2)

        def steps() -> None:
            for step in range(5):
                loss_of(model, step).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

        if is_placed:
            with memwall.fit(model, optimizer, plan=plan_of(model, PARAMETERS, STATE), disk=str(tmp_path)) as session:
                steps()
                assert session._live.in_effect.parameters.away_bytes > 0
                assert session._live.in_effect.keeper.away_bytes > 5 * session._live.in_effect.parameters.away_bytes
        else:
            steps()
        return model, optimizer.state_dict()["state"]

    plain, placed = trained(False), trained(True)
    assert differing(dict(plain[0].named_parameters()), dict(placed[0].named_parameters())) == []
    assert same(plain[1], placed[1])


@pytest.mark.slow
def test_what_its_state_takes_is_known_before_there_is_any_and_found_in_a_trace() -> None:
    net = made(torch.bfloat16)
    optimizer = with_master_weights(torch.optim.AdamW)(net.parameters())
    weight, scale = net.middle[0].weight, net.norm.weight
    group = optimizer.param_groups[0]
    assert expected_state_bytes(optimizer, weight, group, 1) == 3 * 4 * weight.numel()
    assert expected_state_bytes(optimizer, scale, group, 1) == 2 * 4 * scale.numel()

    with memwall.fit(net, optimizer, budget=1 << 40) as session:
        for step in range(3):
            backward(net, step, torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
    trace = session.trace
    assert trace is not None
    assert trace.optimizer == "AdamW"
    sizes = state_sizes(steady_step(trace), 8 << 10)
    assert sizes == tuple(sorted([12 * weight.numel()] * 3 + [12 * net.first.weight.numel()]))


@pytest.mark.parametrize(
    ("given", "named"), [(torch.optim.LBFGS, "LBFGS"), (torch.optim.SparseAdam, "SparseAdam"), ("AdamW", "'AdamW'")]
)
def test_another_class_is_refused(given: Any, named: str) -> None:
    with pytest.raises(ApplyError, match=f"master weights are known for .*{named}.* is none of them; give one of"):
        memwall.with_master_weights(given)


def test_it_is_one_class_each_and_moments_in_8_bits_do_not_go_with_it() -> None:
    kind = memwall.with_master_weights(torch.optim.AdamW)
    assert memwall.with_master_weights(torch.optim.AdamW) is kind is memwall.with_master_weights(kind)
    optimizer = kind([nn.Parameter(torch.ones(4))])
    assert inner_step_of(optimizer) is not inner_step_of(torch.optim.AdamW([nn.Parameter(torch.ones(4))]))
    with pytest.raises(ApplyError, match="keeps float32 master weights beside them"):
        LowBitMoments(optimizer)


class Derived(with_master_weights(torch.optim.AdamW)):  # type: ignore[misc]
    """A user's own."""


def test_a_derived_class_is_copied_as_it_is() -> None:
    assert type(copy.deepcopy(Derived([nn.Parameter(torch.ones(4))]))) is Derived


def test_memory_that_runs_out_before_a_step_costs_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = with_master_weights(torch.optim.SGD)([parameter], lr=2**-12)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    def no_room(_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "float", no_room)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    optimizer.step()
    assert optimizer.state[parameter][MASTER].tolist() == [1 - 2 * 2**-12] * 4


def test_masters_that_a_plain_optimizer_has_rounded_are_float32_again() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = with_master_weights(torch.optim.AdamW)([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    plain = torch.optim.AdamW([parameter])
    plain.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(plain.state_dict())
    rounded_bytes = expected_state_bytes(optimizer, parameter, optimizer.param_groups[0], 1)
    optimizer.step()
    assert optimizer.state[parameter][MASTER].dtype == torch.float32
    assert expected_state_bytes(optimizer, parameter, optimizer.param_groups[0], 1) == rounded_bytes


def test_updates_in_the_graph_are_refused() -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    optimizer = with_master_weights(torch.optim.SGD)([parameter], lr=0.1, differentiable=True)
    with pytest.raises(ApplyError, match="pass differentiable=False, or leave with_master_weights out"):
        optimizer.step()


def test_a_step_that_breaks_off_leaves_parameter_and_master_together(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = with_master_weights(torch.optim.SGD)([parameter], lr=0.25)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.param_groups[0]["lr"] = "no number"
    with pytest.raises(TypeError):
        optimizer.step()
    assert list(optimizer.state) == [parameter]
    assert optimizer.param_groups[0]["params"] == [parameter]
    assert torch.equal(optimizer.state[parameter][MASTER].bfloat16(), parameter)
