"""`FusedAdamW` against torch's own and against fp64, on the CPU; its kernels give the same bits (check_adamw.py)."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memwall.triton_kernels import FusedAdamW
from memwall.triton_kernels.adamw._philox import random_bits

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = [(70, 80), (33,), (16, 16), (17, 241), (2, 3, 5)]
# Quantised: a whole number of blocks, and not; the rest are too small for that.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stochastic": {"stochastic_rounding": True, "seed": 7},
    "8-bit": {"moment_bits": 8},
    "8-bit-stochastic-clipped": {"moment_bits": 8, "stochastic_rounding": True, "max_norm": 3.0},
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Make = Callable[[list[Any]], torch.optim.Optimizer]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def make_params(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)) for s in shapes]


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range = range(5), scale: float = 1.0
) -> None:
    """Steps with gradients that depend on the step's number only."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            gradient = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
            # Of what the parameter's dtype can hold in 16 bits, so that every dtype sees the same.
            p.grad = gradient.to(torch.bfloat16).to(p.dtype)
        optimizer.step()


def trained(make: Make, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params = make_params(dtype)
    train(make(params), params)
    return [p.detach() for p in params]


def assert_as_exact_as_torch(ours: Make, torchs: Make, dtype: torch.dtype) -> None:
    """Error against fp64 at most twice torch's in the same dtype plus an ulp of the largest value."""
    start = [p.detach() for p in make_params(dtype)]

    def from_start(make: Make, wide: torch.dtype) -> list[Tensor]:
        params = [nn.Parameter(p.to(wide, copy=True)) for p in start]
        train(make(params), params)
        return [p.detach() for p in params]

    truth = from_start(torchs, torch.float64)
    for found, plain, true in zip(from_start(ours, dtype), from_start(torchs, dtype), truth, strict=True):
        error, allowed = ((t.double() - true).abs().max() for t in (found, plain))
        assert found.dtype == dtype
        assert error <= 2 * allowed + torch.finfo(dtype).eps * true.abs().max()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3},
        {"eps": 1e-3, "maximize": True, "weight_decay": 0.0},
        {"eps": 1e-3, "betas": (0.0, 0.5)},
    ],
    ids=["default", "all", "maximize", "no-momentum"],
)
def test_is_as_exact_as_torchs_adamw(dtype: torch.dtype, options: dict[str, Any]) -> None:
    if dtype == torch.float16:
        # Torch's moments have the parameter's dtype, in which its default of 1e-8 is 0.
        options = {"eps": 1e-3, **options}
    assert_as_exact_as_torch(lambda ps: FusedAdamW(ps, **options), lambda ps: torch.optim.AdamW(ps, **options), dtype)


def test_in_fp32_it_is_torchs_to_two_ulps() -> None:
    for ours, plain in zip(trained(FusedAdamW), trained(torch.optim.AdamW), strict=True):
        assert (ours - plain).abs().max() <= 2 * torch.finfo(torch.float32).eps * plain.abs().max()


def test_in_fp64_it_is_torchs_to_two_ulps() -> None:
    found, plain = (trained(make, torch.float64) for make in (FusedAdamW, torch.optim.AdamW))
    for ours, expected in zip(found, plain, strict=True):
        assert (ours - expected).abs().max() <= 2 * torch.finfo(torch.float64).eps * expected.abs().max()


@pytest.mark.parametrize("max_norm", [0.5, 1e6], ids=["clips", "leaves"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_clipping_is_clip_grad_norm_before_the_step(max_norm: float, dtype: torch.dtype) -> None:
    class Clipped(torch.optim.AdamW):
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], max_norm)
            super().step()

    # An eps at which the size of gradients shows, which AdamW otherwise divides out.
    assert_as_exact_as_torch(
        lambda ps: FusedAdamW(ps, eps=0.1, max_norm=max_norm), lambda ps: Clipped(ps, eps=0.1), dtype
    )


def test_the_norm_is_that_of_all_gradients_and_gradients_stay_as_they_are() -> None:
    params = [*make_params(), *make_params(torch.bfloat16)]
    groups = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.0}]
    optimizer = FusedAdamW(groups, max_norm=0.1)
    train(optimizer, params, range(1))
    grads = [p.grad for p in params if p.grad is not None]
    before = [(grad.clone(), grad._version) for grad in grads]
    optimizer.step()
    expected = torch.cat([grad.double().flatten() for grad in grads]).norm()
    assert optimizer.grad_norm is not None
    assert optimizer.grad_norm.item() == pytest.approx(expected.item(), rel=1e-7)
    assert all(torch.equal(grad, old) and grad._version == v for grad, (old, v) in zip(grads, before, strict=True))


def test_groups_have_options_of_their_own_and_a_scheduler_changes_lr() -> None:
    def make(optimizer: Any) -> list[Tensor]:
        params = make_params()
        found = optimizer([{"params": params[:2], "lr": 0.1}, {"params": params[2:], "weight_decay": 0.5}], lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(found, step_size=2, gamma=0.1)
        for step in range(5):
            train(found, params, range(step, step + 1))
            scheduler.step()
        return [p.detach() for p in params]

    for ours, plain in zip(make(FusedAdamW), make(torch.optim.AdamW), strict=True):
        assert (ours - plain).abs().max() <= 2 * torch.finfo(torch.float32).eps * plain.abs().max()


def test_lr_may_be_a_tensor() -> None:
    found, expected = (trained(lambda ps, lr=lr: FusedAdamW(ps, lr=lr)) for lr in (torch.tensor(0.25), 0.25))
    assert all(torch.equal(ours, plain) for ours, plain in zip(found, expected, strict=True))


def test_a_parameter_without_a_gradient_waits(kind: dict[str, Any]) -> None:
    """Neither moved nor counted: its next step is its own, as if the other parameters were not there."""
    params, alone = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer, lonely = (
        FusedAdamW(params, **{**kind, "max_norm": None}),
        FusedAdamW(alone, **{**kind, "max_norm": None}),
    )
    for step in range(4):
        before = params[1].detach().clone()
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(params, alone, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
            q.grad = p.grad.clone()
        if step in (1, 2):
            params[1].grad = None
        optimizer.step()
        if step in (0, 3):
            for number, q in enumerate(alone):
                q.grad = q.grad if number == 1 else None
            lonely.step()
        assert torch.equal(params[1], before) == (step in (1, 2))
    assert torch.equal(params[1], alone[1])
    assert optimizer.state[params[1]]["step"] == 2
    assert optimizer.state[params[0]]["step"] == 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_resumed_training_has_the_same_bits(kind: dict[str, Any], dtype: torch.dtype, tmp_path: Any) -> None:
    """Also where torch's own `load_state_dict` would cast the moments to the parameters' dtype."""
    params = make_params(dtype)
    optimizer = FusedAdamW(params, **kind)
    train(optimizer, params, range(3))
    torch.save({"params": params, "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    train(optimizer, params, range(3, 6))
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = [nn.Parameter(p.detach()) for p in saved["params"]]
    resumed = FusedAdamW(again, **{**kind, "seed": 12345})
    resumed.load_state_dict(saved["optimizer"])
    train(resumed, again, range(3, 6))
    for p, q in zip(params, again, strict=True):
        assert torch.equal(p, q)
        for name, value in optimizer.state[p].items():
            assert torch.equal(value, resumed.state[q][name])


def test_takes_over_from_torchs_adamw() -> None:
    params, plain = make_params(), make_params()
    first, expected = torch.optim.AdamW(params, lr=0.02), torch.optim.AdamW(plain, lr=0.02)
    train(first, params, range(3))
    train(expected, plain, range(6))
    second = FusedAdamW(params)
    second.load_state_dict(first.state_dict())
    train(second, params, range(3, 6))
    for p, q in zip(params, plain, strict=True):
        assert (p - q).abs().max() <= 2 * torch.finfo(torch.float32).eps * q.abs().max()


def test_a_copy_goes_on_alike(kind: dict[str, Any]) -> None:
    params = make_params(torch.bfloat16)
    optimizer = FusedAdamW(params, **kind)
    train(optimizer, params, range(2))
    other = copy.deepcopy(optimizer)
    others = [p for group in other.param_groups for p in group["params"]]
    train(optimizer, params, range(2, 4))
    train(other, others, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_two_runs_are_bitwise_equal_and_seeds_differ() -> None:
    def run(seed: int) -> list[Tensor]:
        return trained(lambda ps: FusedAdamW(ps, stochastic_rounding=True, seed=seed), torch.bfloat16)

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first[:1], other[:1], strict=True))


def decayed(value: float, num_elements: int, num_steps: int, **options: Any) -> Tensor:
    """[steps, elements]: bf16 values after each step of decay by 2^-10, all of which round down to nearest."""
    p = nn.Parameter(torch.full((1, num_elements), value, dtype=torch.bfloat16))
    optimizer = FusedAdamW([p], lr=2.0**-10, weight_decay=1.0, **options)
    found = []
    for _ in range(num_steps):
        with torch.no_grad():
            p.fill_(value)
        p.grad = torch.zeros_like(p)
        optimizer.step()
        found.append(p.detach().float())
    return torch.cat(found)


@pytest.mark.parametrize("value", [1.5, -1.5])
def test_stochastic_rounding_has_no_bias(value: float) -> None:
    """1.5 (1 - 2^-10) lies 3/16 of the way from 1.5 to the next number, 2^-7 away: exactly so on average."""
    found = decayed(value, 4096, 4, stochastic_rounding=True)
    moved = (found != value).float()
    assert set(found.unique().tolist()) == {value, value * (1 - 2.0**-7 / 1.5)}
    sigma = (3 / 16 * 13 / 16 / moved.numel()) ** 0.5
    assert abs(float(moved.mean()) - 3 / 16) < 4 * sigma
    assert (decayed(value, 4096, 1) == value).all()


def test_random_bits_differ_by_step_element_and_parameter() -> None:
    found = decayed(1.5, 4096, 2, stochastic_rounding=True) != 1.5
    params = [nn.Parameter(torch.full((1, 4096), 1.5, dtype=torch.bfloat16)) for _ in range(2)]
    for p in params:
        p.grad = torch.zeros_like(p)
    FusedAdamW(params, lr=2.0**-10, weight_decay=1.0, stochastic_rounding=True).step()
    assert torch.equal(params[0][0] != 1.5, found[0])
    pairs = [(found[0], found[1]), (params[0][0] != 1.5, params[1][0] != 1.5), (found[0][:-8], found[0][8:])]
    # Independent streams of share 3/16 agree in 1 - 2 * 3/16 * 13/16 of the elements.
    for first, second in pairs:
        assert float((first == second).float().mean()) == pytest.approx(1 - 2 * 3 / 16 * 13 / 16, abs=0.04)


def test_philox_is_the_published_one() -> None:
    """Known answers of Random123: Philox4x32-10 with counter and key of zeros."""
    bits = random_bits(0, 0, 8, 0, 0, torch.device("cpu")).tolist()
    words = [low | high << 16 for low, high in zip(bits[::2], bits[1::2], strict=True)]
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "slice"])
def test_layouts(kind: dict[str, Any], layout: str) -> None:
    """Any dense memory format, at any offset, with gradients laid out otherwise: as the flat tensor in that memory."""
    torch.manual_seed(0)
    values = torch.randn(8, 16, 9, 5).bfloat16()
    buffer = torch.zeros(values.numel() + 3, dtype=torch.bfloat16)
    tensor = {
        "channels-last": values.clone(memory_format=torch.channels_last),
        "transposed": values.transpose(0, 1).contiguous().transpose(0, 1),
        "slice": buffer[3:].view(values.shape).copy_(values),
    }[layout]
    p, flat = nn.Parameter(tensor), nn.Parameter(tensor.as_strided((1, tensor.numel()), (1, 1)).clone())
    optimizers = [FusedAdamW([q], lr=0.1, **kind) for q in (p, flat)]
    for _ in range(2):
        gradient = torch.randn_like(p)
        p.grad = gradient.clone(memory_format=torch.contiguous_format)
        flat.grad = gradient.as_strided(flat.shape, (1, 1)).clone()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(p.as_strided(flat.shape, (1, 1)), flat)
    assert not torch.equal(p, values)
    assert not buffer[:3].any()


def test_nan_and_infinity_come_out(kind: dict[str, Any]) -> None:
    p = nn.Parameter(torch.ones(1, 5000, dtype=torch.bfloat16))
    optimizer = FusedAdamW([p], **{**kind, "max_norm": None})
    p.grad = torch.ones_like(p)
    p.grad[0, 10], p.grad[0, 300] = torch.nan, torch.inf
    optimizer.step()
    assert p[0].isnan().nonzero().flatten().tolist() == [10, 300]
    p.grad = torch.ones_like(p)
    optimizer.step()
    is_bad = p[0].isnan()
    assert is_bad[[10, 300]].all()
    assert not is_bad[512:].any()


def test_a_norm_that_is_no_number_reaches_every_parameter() -> None:
    """As with `clip_grad_norm_`."""
    params = make_params()
    optimizer = FusedAdamW(params, max_norm=1.0)
    train(optimizer, params, range(1))
    assert params[1].grad is not None
    params[1].grad[3] = torch.nan
    optimizer.step()
    assert all(p.isnan().all() for p in params)


def test_poisoned_memory_does_not_show(kind: dict[str, Any], poisoned: None) -> None:
    for p in trained(lambda ps: FusedAdamW(ps, **kind), torch.bfloat16):
        assert p.isfinite().all()


def test_version_counters_see_the_step(kind: dict[str, Any]) -> None:
    params = make_params()
    optimizer = FusedAdamW(params, **kind)
    train(optimizer, params, range(1))
    written = [*params, *(value for p in params for value in optimizer.state[p].values())]
    before = [tensor._version for tensor in written]
    optimizer.step()
    assert all(tensor._version > version for tensor, version in zip(written, before, strict=True))


def test_autograd_refuses_a_graph_whose_parameter_was_stepped() -> None:
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    FusedAdamW([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_empty_tensors_and_scalars() -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((0,), (3, 0), (), (1,))]
    optimizer = FusedAdamW(params, lr=0.1, max_norm=100.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert [p.numel() for p in params] == [0, 0, 1, 1]
    assert params[2].item() == params[3].item() == pytest.approx(0.899, abs=1e-6)
    only_empty = FusedAdamW(params[:2], max_norm=1.0)
    only_empty.step()
    assert only_empty.grad_norm == 0.0


def test_a_closure_gives_the_loss() -> None:
    p = nn.Parameter(torch.tensor([2.0]))
    optimizer = FusedAdamW([p], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 4.0
    assert p < 2.0
