"""Gradients of torch.func are computed without a graph where nothing can differentiate them, to the same bits."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchgen
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.func import grad, hessian, jacrev, vjp, vmap

from memwall.patches import Patches
from memwall.torch_internals.transforms import _PLAIN, without_needless_graphs


@pytest.fixture
def _ends_graphs() -> Iterator[None]:
    with Patches("a test") as patches:
        without_needless_graphs(patches)
        yield


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns whether each gradient that is computed from now on has its backward recorded."""
    found, original = list[bool](), torch.autograd.grad

    def computed(*args: Any, create_graph: bool, **kwargs: Any) -> Any:
        found.append(create_graph)
        return original(*args, create_graph=create_graph, **kwargs)

    monkeypatch.setattr(torch.autograd, "grad", computed)
    return found


def exponential(given: Tensor, other: Tensor | None = None) -> Tensor:
    return (given.tanh() if other is None else given.tanh() * other).exp().sum()


def without_graphs(transformed: Callable[..., Any], *args: Any) -> Any:
    with Patches("a test") as patches:
        without_needless_graphs(patches)
        return transformed(*args)


@pytest.mark.parametrize("transform", [grad, lambda loss: vmap(grad(loss))], ids=["grad", "vmap of grad"])
def test_a_gradient_that_nothing_differentiates_keeps_no_graph(
    transform: Callable[..., Callable[[Tensor], Tensor]], recorded: list[bool]
) -> None:
    given, gradient = torch.randn(4, 3), transform(exponential)
    expected = gradient(given)
    assert torch.equal(without_graphs(gradient, given), expected)
    assert torch.equal(gradient(given), expected)
    assert recorded == [True, False, True]


@pytest.mark.usefixtures("_ends_graphs")
def test_a_gradient_of_what_requires_one_outside_keeps_its_graph(recorded: list[bool]) -> None:
    given = torch.randn(3, requires_grad=True)
    grad(exponential)(given).square().sum().backward()
    other = torch.randn(3, requires_grad=True)
    grad(exponential)(given.detach(), other).sum().backward()
    assert other.grad is not None
    assert recorded == [True, True]


def _in_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


Register = Callable[[Tensor, Tensor, Callable[[Tensor], Tensor]], Any]
HOOKS: dict[str, Register] = {
    "tensor": lambda _, h, hook: h.register_hook(hook),
    "argument": lambda x, _, hook: x.register_hook(hook),
    "node": lambda _, h, hook: h.grad_fn.register_hook(lambda found, _: tuple(map(hook, found))),
    "node before": lambda _, h, hook: h.grad_fn.register_prehook(lambda given: tuple(map(hook, given))),
    "edge": lambda _, h, hook: get_gradient_edge(h).node.register_prehook(lambda given: tuple(map(hook, given))),
    "another thread": lambda _, h, hook: _in_thread(lambda: h.register_hook(hook)),
    "within another gradient": lambda x, h, hook: grad(lambda y: h.register_hook(hook) and y.sum())(x.detach()),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
@pytest.mark.parametrize("transform", [grad, lambda loss: vmap(grad(loss)), jacrev], ids=["grad", "vmap", "jacrev"])
def test_what_a_hook_brings_in_has_its_gradient(
    register: Register, transform: Callable[..., Callable[[Tensor], Tensor]]
) -> None:
    """GIVEN a hook that multiplies by something trained outside THEN that gets the gradient of plain torch."""
    scale, given = torch.tensor(3.0, requires_grad=True), torch.randn(2, 3)

    def loss(x: Tensor) -> Tensor:
        h = x.tanh()
        register(x, h, lambda gradient: gradient * scale)
        return h.exp().sum()

    def gradients() -> tuple[Tensor, ...]:
        found = transform(loss)(given)
        return found, *torch.autograd.grad(found.square().sum(), scale)

    expected = gradients()
    assert all(map(torch.equal, without_graphs(gradients), expected))


def test_a_hook_from_before_it_was_known_who_looks_is_heeded() -> None:
    """GIVEN a function that has registered a hook WHEN graphs are let go from within it THEN it keeps its own."""
    scale, patches = torch.tensor(3.0, requires_grad=True), Patches("a test")

    def loss(x: Tensor) -> Tensor:
        h = x.tanh()
        h.register_hook(lambda gradient: gradient * scale)
        without_needless_graphs(patches)
        return h.exp().sum()

    with patches:
        grad(loss)(torch.randn(3)).sum().backward()
    assert scale.grad is not None


@pytest.mark.usefixtures("_ends_graphs")
def test_a_hook_has_the_graph_of_its_own_gradient_kept_alone(recorded: list[bool]) -> None:
    def hooked(x: Tensor) -> Tensor:
        h = x.tanh()
        h.register_hook(lambda gradient: gradient)
        return h.sum()

    for function in (hooked, exponential, hooked):
        grad(function)(torch.randn(3))
    assert recorded == [True, False, True]


@pytest.mark.parametrize("transform", [hessian, lambda loss: grad(lambda x: grad(loss)(x).sum()), jacrev])
def test_a_transform_around_a_gradient_still_differentiates_it(
    transform: Callable[..., Callable[[Tensor], Tensor]],
) -> None:
    given = torch.randn(3)

    def loss(x: Tensor) -> Tensor:
        return x.tanh().exp().sum()

    assert torch.equal(without_graphs(transform(loss), given), transform(loss)(given))


@pytest.mark.usefixtures("_ends_graphs")
def test_a_function_that_returns_gradients_can_be_called_again() -> None:
    pull_back = vjp(lambda x: x.tanh().exp(), torch.randn(3))[1]
    first = pull_back(torch.ones(3))[0]
    assert torch.equal(pull_back(torch.ones(3))[0], first)


@pytest.mark.slow
@pytest.mark.usefixtures("_ends_graphs")
def test_compiled_gradients_are_compiled_as_before() -> None:
    compiled = torch.compile(grad(lambda x: x.tanh().exp().sum()), backend="eager", fullgraph=True)
    given = torch.randn(3)
    assert torch.allclose(compiled(given), grad(lambda x: x.tanh().exp().sum())(given))


@pytest.mark.usefixtures("_ends_graphs")
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
def test_a_backward_that_has_two_formulas_keeps_its_graph(
    forward: Callable[[Tensor], Tensor], recorded: list[bool]
) -> None:
    """GIVEN an operator that torch differentiates otherwise where that is recorded THEN its bits are as ever."""
    grad(lambda x: exponential(forward(x * 2)))(torch.randn(3, 4, 4))
    assert recorded == [True]


@pytest.mark.usefixtures("_ends_graphs")
def test_a_network_of_plain_layers_keeps_no_graph_and_has_equal_gradients(recorded: list[bool]) -> None:
    given, weight, bias = torch.randn(5, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4)
    matrix = torch.randn(6, 144)

    def of(weight: Tensor, matrix: Tensor) -> Tensor:
        x = F.gelu(F.conv2d(given, weight, bias)).flatten(1)
        x = F.layer_norm(F.linear(x, matrix).relu(), (6,)).softmax(-1)
        return F.cross_entropy(x, torch.arange(5))

    found = grad(of, argnums=(0, 1))(weight, matrix)
    leaves = weight.clone().requires_grad_(), matrix.clone().requires_grad_()
    expected = torch.autograd.grad(of(*leaves), leaves, create_graph=True)
    assert all(map(torch.equal, found, expected))
    assert recorded == [False, True]


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
