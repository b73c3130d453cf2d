"""Gradients of torch.func are computed without a graph where nothing can differentiate them, to the same bits."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor
from torch.func import grad, hessian, jacrev, vjp, vmap

from memwall.torch_internals.transforms import _PLAIN, without_needless_graphs


@pytest.fixture
def ends_graphs() -> Iterator[Callable[[], None]]:
    end = without_needless_graphs()
    assert end is not None
    yield end
    end()


class Watched:
    """Computes a loss, and sees whether its backward is recorded."""

    def __init__(self) -> None:
        self.recorded: list[bool] = []

    def __call__(self, given: Tensor, other: Tensor | None = None) -> Tensor:
        product = given.tanh() if other is None else given.tanh() * other
        product.register_hook(lambda gradient: self.recorded.append(gradient.requires_grad))
        return product.exp().sum()


@pytest.mark.parametrize("transform", [grad, lambda loss: vmap(grad(loss))], ids=["grad", "vmap of grad"])
def test_a_gradient_that_nothing_differentiates_keeps_no_graph(
    transform: Callable[[Watched], Callable[..., Tensor]],
) -> None:
    given, loss = torch.randn(4, 3), Watched()
    expected = transform(loss)(given)
    end = without_needless_graphs()
    assert end is not None
    try:
        assert torch.equal(transform(loss)(given), expected)
    finally:
        end()
    assert torch.equal(transform(loss)(given), expected)
    assert loss.recorded == [True, False, True]


@pytest.mark.usefixtures("ends_graphs")
def test_a_gradient_of_what_requires_one_outside_keeps_its_graph() -> None:
    given, loss = torch.randn(3, requires_grad=True), Watched()
    grad(loss)(given).square().sum().backward()
    assert loss.recorded[0]
    other = torch.randn(3, requires_grad=True)
    grad(loss)(given.detach(), other).sum().backward()
    assert other.grad is not None
    assert loss.recorded[-1]


@pytest.mark.parametrize("transform", [hessian, lambda loss: grad(lambda x: grad(loss)(x).sum()), jacrev])
def test_a_transform_around_a_gradient_still_differentiates_it(
    transform: Callable[..., Callable[[Tensor], Tensor]],
) -> None:
    given = torch.randn(3)

    def loss(x: Tensor) -> Tensor:
        return x.tanh().exp().sum()

    expected = transform(loss)(given)
    end = without_needless_graphs()
    assert end is not None
    try:
        assert torch.equal(transform(loss)(given), expected)
    finally:
        end()


@pytest.mark.usefixtures("ends_graphs")
def test_a_function_that_returns_gradients_can_be_called_again() -> None:
    pull_back = vjp(lambda x: x.tanh().exp(), torch.randn(3))[1]
    first = pull_back(torch.ones(3))[0]
    assert torch.equal(pull_back(torch.ones(3))[0], first)


@pytest.mark.slow
@pytest.mark.usefixtures("ends_graphs")
def test_compiled_gradients_are_compiled_as_before() -> None:
    compiled = torch.compile(grad(lambda x: x.tanh().exp().sum()), backend="eager", fullgraph=True)
    given = torch.randn(3)
    assert torch.allclose(compiled(given), grad(lambda x: x.tanh().exp().sum())(given))


@pytest.mark.usefixtures("ends_graphs")
@pytest.mark.parametrize(
    "forward",
    [
        lambda x: F.group_norm(x, 2),
        F.silu,
        F.mish,
        lambda x: F.rms_norm(x, (4,)),
        lambda x: torch.native_dropout(x, 0.5, True)[0],
    ],
    ids=["group norm", "silu", "mish", "rms norm", "dropout"],
)
def test_a_backward_that_has_two_formulas_keeps_its_graph(forward: Callable[[Tensor], Tensor]) -> None:
    """GIVEN an operator that torch differentiates otherwise where that is recorded THEN its bits are as ever."""
    loss, given = Watched(), torch.randn(3, 4, 4)
    grad(lambda x: loss(forward(x * 2)))(given)
    assert loss.recorded == [True]


@pytest.mark.usefixtures("ends_graphs")
def test_a_network_of_plain_layers_keeps_no_graph_and_has_equal_gradients() -> None:
    given, weight, bias = torch.randn(5, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    matrix, loss = torch.randn(6, 144), Watched()

    def of(weight: Tensor, matrix: Tensor) -> Tensor:
        x = F.gelu(F.conv2d(given, weight, bias)).flatten(1)
        x = F.layer_norm(F.linear(x, matrix).relu(), (6,)).softmax(-1)
        return F.cross_entropy(x + loss(x) * 0, torch.arange(5))

    found = grad(of, argnums=(0, 1))(weight, matrix)
    leaves = weight.clone().requires_grad_(), matrix.clone().requires_grad_()
    expected = torch.autograd.grad(of(*leaves), leaves, create_graph=True)
    assert all(map(torch.equal, found, expected))
    assert loss.recorded[0] is False


def test_no_formula_of_plain_steps_asks_whether_it_is_recorded() -> None:
    """GIVEN this torch's formulas WHEN one looks at the mode of gradients THEN its step is not called plain."""
    text = (Path(torchgen.__file__).parent / "packaged" / "autograd" / "derivatives.yaml").read_text()
    entries = dict[str, str]()
    for entry in text.split("\n- name: ")[1:]:
        operator = re.split(r"\W", entry, maxsplit=1)[0]
        name = "".join(part.capitalize() for part in operator.split("_"))
        entries[name] = entries.get(name, "") + entry
    with_two = {name for name, entry in entries.items() if "GradMode" in entry}
    assert {"NativeGroupNorm", "Silu", "Mish", "NativeDropout"} <= with_two
    assert not {name.rpartition("Backward")[0] for name in _PLAIN} & with_two
