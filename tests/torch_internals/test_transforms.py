"""Gradients of torch.func are computed without a graph where nothing can differentiate them, to the same bits."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, vjp, vmap

from memwall.torch_internals.transforms import without_needless_graphs


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
