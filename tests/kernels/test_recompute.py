"""Recompute handles: a result of these operations is rebuilt for backward instead of kept, on models as they are."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from memwall.apply.offload.engine import ActivationOffload
from memwall.predict.call_rules import REBUILDABLE_OPS
from memwall.store.scratch import ScratchFile
from memwall.store.transfer import TransferPool
from memwall.triton_kernels import geglu, layer_norm, recompute_handles, rms_norm, swiglu
from memwall.triton_kernels.recompute import RecomputeHandles, RecomputeModifiedError, publish

pytestmark = pytest.mark.usefixtures("one_thread")


class Mlp(nn.Module):
    """Gate and up into one product, which as many layers as wanted take; no word of handles."""

    def __init__(self, width: int = 24, *, num_consumers: int = 1) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(12, width), nn.Linear(12, width)
        self.down = nn.ModuleList(nn.Linear(width, 12) for _ in range(num_consumers))

    def forward(self, x: Tensor) -> Tensor:
        product = swiglu(self.gate(x), self.up(x))
        return torch.stack([down(product) for down in self.down]).sum(0)


def gradients(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor, hooks: Any = None) -> list[Tensor]:
    if hooks is None:
        loss = run(x).square().sum()
    else:
        with hooks:
            loss = run(x).square().sum()
    return list(torch.autograd.grad(loss, [x, *model.parameters()]))


def assert_bitwise(found: list[Tensor], expected: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, 12, requires_grad=True)


@pytest.mark.parametrize("num_consumers", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_bitwise_those_without(x: Tensor, num_consumers: int, dtype: torch.dtype) -> None:
    model, x = Mlp(num_consumers=num_consumers).to(dtype), x.detach().to(dtype).requires_grad_()
    handles = recompute_handles()
    found = gradients(model, model, x, handles)
    assert_bitwise(found, gradients(model, model, x))
    # Rebuilt once for all that saved it.
    assert (handles.num_replaced, handles.num_rebuilt) == (num_consumers, 1)
    assert handles.dropped_bytes == 10 * 24 * dtype.itemsize


@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.view(10, 24),
        lambda y: y.transpose(0, 1),
        lambda y: y[1:, 2:4, ::3],
        lambda y: y.permute(2, 0, 1)[5:],
        lambda y: y[:, :1].expand(2, 5, 24),
    ],
)
def test_what_comes_back_has_the_bits_the_shape_and_the_strides_of_what_went(view: Any) -> None:
    seen: list[Tensor] = []
    layouts: list[tuple[tuple[int, ...], int]] = []

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            ctx.save_for_backward(value)
            seen.append(value.detach().clone())
            layouts.append((value.stride(), value.storage_offset()))
            return value * 1.0

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.extend(ctx.saved_tensors)
            return grad

    gate, up = (torch.randn(2, 5, 24, requires_grad=True) for _ in range(2))
    with recompute_handles() as handles:
        loss = Saves.apply(view(swiglu(gate, up))).sum()
    loss.backward()
    saved, restored = seen
    assert handles.num_rebuilt == 1
    assert [(restored.stride(), restored.storage_offset())] == layouts
    assert torch.equal(restored, saved)


@pytest.mark.slow
def test_a_forward_without_a_backward_leaves_nothing_behind(x: Tensor) -> None:
    """GIVEN an operation that saves its own result THEN graph and saved result do not hold each other for ever."""
    with recompute_handles():
        result = x.exp()
        storage = StorageWeakRef(result.untyped_storage())
    del result
    gc.collect()
    assert storage.expired()


@pytest.mark.slow
def test_the_result_is_freed_between_forward_and_backward(x: Tensor) -> None:
    model, alive = Mlp(), []

    def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        alive.append(weakref.ref(args[0].untyped_storage()))

    model.down[0].register_forward_pre_hook(remember)
    with recompute_handles():
        loss = model(x).sum()
    gc.collect()
    assert alive[0]() is None
    with_it_kept = model(x).sum()
    gc.collect()
    assert alive[1]() is not None
    del loss, with_it_kept


def test_backward_twice_with_retained_graph(x: Tensor) -> None:
    model, handles = Mlp(num_consumers=3), recompute_handles()
    with handles:
        loss = model(x).square().sum()
    inputs = [x, *model.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs)
    assert_bitwise(list(first), list(second))
    assert handles.num_rebuilt == 2


@pytest.mark.slow
def test_a_partial_backward_leaves_nothing_behind(x: Tensor) -> None:
    model, rebuilt = Mlp(num_consumers=3), []
    handles = recompute_handles()
    with handles:
        product = swiglu(model.gate(x), model.up(x))
        losses = [down(product).sum() for down in model.down]
    del product
    torch.autograd.grad(losses[0], model.down[0].weight)
    rebuilt = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (2, 5, 24) and o.grad_fn is None]
    # One more than gate and up: it waits for the other two layers.
    assert len({o.untyped_storage()._cdata for o in rebuilt}) == 3
    del rebuilt, losses
    gc.collect()
    left = [o for o in gc.get_objects() if type(o) is Tensor and o.shape == (2, 5, 24)]
    assert left == []


def test_a_changed_input_raises_instead_of_rebuilding_something_else() -> None:
    gate, up = (torch.randn(5, 24, requires_grad=True) for _ in range(2))
    down = nn.Linear(24, 3)
    with recompute_handles():
        doubled = gate * 2.0
        loss = down(swiglu(doubled, up)).sum()
    doubled.detach().add_(1.0)
    with pytest.raises(RecomputeModifiedError, match=r"modified in place.*\[5, 24\] is at version 1, expected 0"):
        loss.backward()


def test_a_changed_weight_of_another_layer_raises_as_without_handles(x: Tensor) -> None:
    model = Mlp()
    with recompute_handles():
        loss = model(x).sum()
    with torch.no_grad():
        model.down[0].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified in place"):
        loss.backward()


def test_a_result_that_was_written_before_it_was_saved_is_kept() -> None:
    gate, up = (torch.randn(5, 24, requires_grad=True) for _ in range(2))
    down = nn.Linear(24, 3)
    with recompute_handles() as handles:
        product = swiglu(gate, up)
        product.mul_(3.0)
        loss = down(product).sum()
    assert handles.num_replaced == 0
    (found,) = torch.autograd.grad(loss, gate)
    (expected,) = torch.autograd.grad(down(3.0 * swiglu(gate, up)).sum(), gate)
    assert torch.equal(found, expected)


def test_an_input_that_was_written_before_the_result_was_saved_keeps_the_result() -> None:
    gate, up = torch.randn(5, 24), torch.randn(5, 24, requires_grad=True)
    down = nn.Linear(24, 3)
    with recompute_handles() as handles:
        product = swiglu(gate, up)
        gate.zero_()
        down(product).sum()
    assert handles.num_replaced == 0


def test_a_frozen_layer_saves_nothing_of_its_input_and_an_adapter_does(x: Tensor) -> None:
    """LoRA: the base layer is frozen; only the adapter's first matrix keeps the product."""
    model = Mlp(num_consumers=2)
    for parameter in model.down[0].parameters():
        parameter.requires_grad_(False)
    handles = recompute_handles()
    run = lambda x: model(x).square().sum()  # noqa: E731
    with handles:
        loss = run(x)
    assert handles.num_replaced == 1
    inputs = [x, *(p for p in model.parameters() if p.requires_grad)]
    assert_bitwise(list(torch.autograd.grad(loss, inputs)), list(torch.autograd.grad(run(x), inputs)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_a_checkpointed_block_nothing_is_replaced(x: Tensor, use_reentrant: bool) -> None:
    model, handles = Mlp(), recompute_handles()
    with handles:
        loss = checkpoint(model, x, use_reentrant=use_reentrant).square().sum()
    loss.backward()
    assert handles.num_replaced == 0
    assert x.grad is not None
    found = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert_bitwise(found, gradients(model, model, x))


def test_what_has_no_recipe_is_offloaded_and_so_is_what_recipes_need(x: Tensor, tmp_path: Any) -> None:
    model = Mlp(width=4096)
    expected = gradients(model, model, x)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with (
        TransferPool(ScratchFile(tmp_path), block_bytes=1 << 16) as pool,
        ActivationOffload(
            pool, min_bytes=1 << 16, is_excluded=lambda t: t.untyped_storage().data_ptr() in parameters
        ) as offload,
    ):
        handles = recompute_handles(offload)
        found = gradients(model, model, x, handles)
        # Gate and up, once each; the product neither kept nor moved.
        assert offload.bytes_written == 2 * 10 * 4096 * 4
    assert handles.num_rebuilt == 1
    assert_bitwise(found, expected)


def test_handles_inside_handles_leave_the_outer_ones_as_they_were(x: Tensor) -> None:
    model, outer, inner = Mlp(), recompute_handles(), recompute_handles()
    with outer:
        with inner:
            first = model(x).sum()
        second = model(x).sum()
    assert (outer.num_replaced, inner.num_replaced) == (1, 1)
    (first + second).backward()
    assert (outer.num_rebuilt, inner.num_rebuilt) == (1, 1)


def test_without_gradients_and_outside_of_handles_nothing_is_remembered(x: Tensor) -> None:
    model, handles = Mlp(), recompute_handles()
    with handles, torch.no_grad():
        model(x)
    model(x)
    assert handles.num_replaced == 0
    assert handles._recipes == {}


def test_many_results_come_and_go_without_a_trace() -> None:
    """Addresses are used again after a free: a recipe dies with its result."""
    down = nn.Linear(64, 3)
    with recompute_handles() as handles:
        for number in range(50):
            gate, up = (torch.full((4, 64), float(number), requires_grad=True) for _ in range(2))
            loss = down(swiglu(gate, up)).sum()
            unrelated = torch.randn(4, 64, requires_grad=True)
            down(unrelated).sum().backward()
            loss.backward()
            assert gate.grad is not None
        assert len(handles._recipes) <= 1
    assert handles.num_replaced == handles.num_rebuilt == 50


def test_planners_know_which_operations_results_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """`memwall.predict` sees them in a trace by name, and does not import kernels."""
    published: set[str] = set()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "memwall":
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []

    def note(self: RecomputeHandles, result: Tensor, rebuild: Any, inputs: Any) -> None:
        published.add(seen[-1])

    monkeypatch.setattr(RecomputeHandles, "publish", note)
    gate, up, weight = (torch.randn(5, 24, requires_grad=True) for _ in range(3))
    weight = weight[0]
    with Operators(), recompute_handles():
        for operation in (
            lambda: swiglu(gate, up),
            lambda: swiglu(gate),
            lambda: geglu(gate, up),
            lambda: rms_norm(gate, weight),
            lambda: layer_norm(gate, weight, weight),
        ):
            seen.clear()
            operation()
    assert published == REBUILDABLE_OPS


def test_a_result_from_elsewhere_can_be_published_too() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    layer = nn.Linear(6, 3)
    with recompute_handles() as handles:
        y = x * 2.0
        publish(y, lambda value, factor: value * factor, x, 2.0)
        loss = layer(y).sum()
    loss.backward()
    assert isinstance(handles, RecomputeHandles)
    assert handles.num_rebuilt == 1
