"""Moments of 8 bits: how far they are from exact ones, and what that does to training."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.triton_kernels.adamw_8bit import Moments, _reference, adamw_8bit_, new_moments

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK = 256


class Stepper:
    """Steps parameters one by one, as an optimizer would."""

    def __init__(self, parameters: Iterable[Tensor], **options: float) -> None:
        self._moments = {parameter: new_moments(parameter) for parameter in parameters}
        self._options, self._step = options, 0

    def step(self) -> None:
        self._step += 1
        for parameter, moments in self._moments.items():
            assert parameter.grad is not None
            adamw_8bit_(parameter, parameter.grad, moments, step=self._step, **self._options)  # type: ignore[arg-type]

    def moments(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        """First moment, and root of the second, [elements] fp64, as the next step reads them."""
        return opened(self._moments[parameter])


def opened(moments: Moments) -> tuple[Tensor, Tensor]:
    first, root = (codes.double() for codes in moments[:2])
    first_unit, root_unit = (units.double().repeat_interleave(BLOCK)[: first.numel()] for units in moments[2:])
    return first * first_unit, root**2 * root_unit


@pytest.mark.parametrize("num_elements", [4096, 5000, 16_384 + 4096], ids=str)
def test_error_in_each_block(num_elements: int) -> None:
    """Half a unit of the first moment; of the root of the second half a code, or, where it is small, none downwards."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(1, num_elements))
    optimizer = Stepper([p])
    # Blocks of very different sizes, and within each elements that are.
    sizes = torch.logspace(-6, 6, -(-num_elements // BLOCK)).repeat_interleave(BLOCK)[:num_elements]
    p.grad = torch.randn(1, num_elements) ** 3 * sizes
    optimizer.step()
    first, root = optimizer.moments(p)
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
    optimizer = Stepper([p])
    for _ in range(1500):
        p.grad = torch.randn(1, 4096) * scale
        optimizer.step()
    _, root = optimizer.moments(p)
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
        "8-bit": lambda ps: Stepper(ps, lr=1.0, weight_decay=0.0),
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


def losses(make: Callable[[list[nn.Parameter]], Any]) -> Tensor:
    """Of a small classifier, one for each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 32))
    x = torch.randn(256, 64)
    target = (x @ torch.randn(64, 32)).argmax(1)
    optimizer = make(list(model.parameters()))
    found = []
    for step in range(60):
        rows = torch.arange(64) + 64 * (step % 4)
        loss = F.cross_entropy(model(x[rows]), target[rows])
        model.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.slow
def test_a_model_trains_to_the_loss_curve_of_exact_moments() -> None:
    """Within 0.2 % of the first loss at every step."""
    exact = losses(lambda ps: torch.optim.AdamW(ps, lr=2e-3))
    found = losses(lambda ps: Stepper(ps, lr=2e-3))
    assert exact[-1] < 0.35 * exact[0]
    assert (found - exact).abs().max() < 0.002 * exact[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parameters_of_every_dtype_are_stepped_in_place(dtype: torch.dtype) -> None:
    """The first step of Adam is the sign of the gradient; none of an empty tensor is an error."""
    p, grad = torch.ones(3, 100, dtype=dtype), torch.linspace(-1.0, 1.0, 300).to(dtype).view(3, 100)
    before = p._version
    adamw_8bit_(p, grad, new_moments(p), step=1, lr=0.25, weight_decay=0.0)
    torch.testing.assert_close(p, 1.0 - 0.25 * grad.sign())
    assert p._version > before
    empty = torch.empty(0, 4)
    adamw_8bit_(empty, empty.clone(), new_moments(empty), step=1)


def test_runs_on_fake_tensors() -> None:
    with FakeTensorMode():
        p = torch.empty(4096, 4096, dtype=torch.bfloat16)
        moments = new_moments(p)
        adamw_8bit_(p, torch.empty_like(p), moments, step=1)
    assert sum(part.nbytes for part in moments) == 2 * p.numel() * (1 + 4 / BLOCK)


@pytest.mark.parametrize("wrong", [torch.zeros(4, 6).t(), torch.zeros(6, 4, dtype=torch.float64)])
def test_tensors_that_a_kernel_cannot_take_are_named(wrong: Tensor) -> None:
    right = torch.zeros(6, 4)
    for pair in ((wrong, right), (right, wrong)):
        with pytest.raises(UsageError, match=r"contiguous tensors of 16 or 32 bits, found .* \[6, 4\]"):
            adamw_8bit_(*pair, new_moments(right), step=1)
