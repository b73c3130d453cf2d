"""Moments of 8 bits: how far they are from exact ones, and what that does to training."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memwall.triton_kernels import FusedAdamW
from memwall.triton_kernels.adamw import _reference

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 256


def moments(state: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """First moment, and root of the second, [elements] fp64, as the next step reads them."""
    first, root = (state[name].flatten().double() for name in ("exp_avg", "exp_avg_sq"))
    units = (
        state[f"{name}_unit"].double().repeat_interleave(BLOCK)[: first.numel()] for name in ("exp_avg", "exp_avg_sq")
    )
    first_unit, root_unit = units
    return first * first_unit, root**2 * root_unit


@pytest.mark.parametrize("num_elements", [4096, 5000, 16_384 + 4096], ids=str)
def test_error_in_each_block(num_elements: int) -> None:
    """Half a unit of the first moment; of the root of the second half a code, or, where it is small, none downwards."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(1, num_elements))
    optimizer = FusedAdamW([p], moment_bits=8)
    # Blocks of very different sizes, and within each elements that are.
    sizes = torch.logspace(-6, 6, -(-num_elements // BLOCK)).repeat_interleave(BLOCK)[:num_elements]
    p.grad = torch.randn(1, num_elements) ** 3 * sizes
    optimizer.step()
    first, root = moments(optimizer.state[p])
    gradient = p.grad[0].double()
    exact, exact_root = 0.1 * gradient, 0.001**0.5 * gradient.abs()
    num_small = 0
    for index in range(0, num_elements, BLOCK):
        part = slice(index, index + BLOCK)
        assert (first[part] - exact[part]).abs().max() <= 0.5001 * exact[part].abs().max() / 127
        codes, exact_codes = (255 * (r / exact_root[part].max()).sqrt() for r in (root[part], exact_root[part]))
        is_small = exact_codes < 15.9
        num_small += int(is_small.sum())
        assert (codes - exact_codes)[~is_small].abs().max() <= 0.501 + 0.5 * (exact_codes[~is_small].min() < 16.1)
        assert (codes - exact_codes)[is_small].min() >= -1e-4
        assert (codes - exact_codes)[is_small].max() <= 1.001
    assert 0.05 < num_small / num_elements < 0.95


def shares_after_1500_steps() -> Tensor:
    """Of the second moment's true root, for elements whose gradients differ tenfold within a block."""
    torch.manual_seed(0)
    scale = torch.logspace(-1, 0, 1024)[torch.randperm(1024)].repeat(4)
    p = nn.Parameter(torch.zeros(1, 4096))
    optimizer = FusedAdamW([p], moment_bits=8)
    for _ in range(1500):
        p.grad = torch.randn(1, 4096) * scale
        optimizer.step()
    _, root = moments(optimizer.state[p])
    return root / scale / (1 - 0.999**1500) ** 0.5


@pytest.mark.slow
def test_the_second_moment_neither_grows_nor_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would if it were always rounded up: two to five times."""
    share = shares_after_1500_steps()
    assert 0.97 < share.mean() < 1.03
    assert share.min() > 0.7
    assert share.max() < 1.4
    monkeypatch.setattr(_reference, "ROOT_CEILING", 256)
    share = shares_after_1500_steps()
    assert share.min() > 1.8
    assert share.max() < 5.2


def test_neighbours_of_a_spike_are_not_thrown() -> None:
    """A root rounded to nearest becomes 0 beside an outlier, and what is divided by it is thrown away."""
    makes: dict[str, Any] = {
        "8-bit": lambda ps: FusedAdamW(ps, lr=1.0, weight_decay=0.0, moment_bits=8),
        "exact": lambda ps: torch.optim.AdamW(ps, lr=1.0, weight_decay=0.0),
    }
    largest = {}
    for name, make in makes.items():
        p = nn.Parameter(torch.zeros(1, 4096))
        optimizer = make([p])
        generator = torch.Generator().manual_seed(0)
        largest[name] = 0.0
        for step in range(60):
            p.grad = torch.randn(1, 4096, generator=generator)
            if step == 0:
                p.grad[0, 5] *= 1e4
            if step % 20 == 10:
                p.grad.zero_()
            before = p.detach().clone()
            optimizer.step()
            largest[name] = max(largest[name], float((p.detach() - before).abs().max()))
    assert largest["8-bit"] <= 1.1 * largest["exact"]


def losses(make: Any, dtype: torch.dtype) -> Tensor:
    """Of a small classifier, one for each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32)).to(dtype)
    x = torch.randn(256, 64)
    target = (x @ torch.randn(64, 32)).argmax(1)
    optimizer = make(model.parameters())
    found = []
    for step in range(60):
        rows = torch.arange(64) + 64 * (step % 4)
        loss = F.cross_entropy(model(x[rows].to(dtype)).float(), target[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_trains_to_the_loss_curve_of_exact_moments(dtype: torch.dtype) -> None:
    """Within 0.2 % of the first loss at every step, 0.5 % where parameters have 16 bits, stochastically rounded."""
    exact = losses(lambda ps: torch.optim.AdamW(ps, lr=2e-3), torch.float32)
    found = losses(lambda ps: FusedAdamW(ps, lr=2e-3, moment_bits=8, stochastic_rounding=True), dtype)
    assert exact[-1] < 0.35 * exact[0]
    share = 0.002 if dtype == torch.float32 else 0.005
    assert (found - exact).abs().max() < share * exact[0]
