"""The loss of given logits: what needs no kernel: mistakes, fake tensors, torch's rules for operators, and the cost."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.machine.hardware import hardware_named
from memwall.triton_kernels import softmax_cross_entropy
from memwall.triton_kernels._softmax_loss_ops import softmax_loss_op
from memwall.triton_kernels.softmax_cross_entropy import SoftmaxLossShape, cost

H200 = hardware_named("h200")


def test_gradients_by_finite_differences(terms: dict[str, Any]) -> None:
    options = {name: value for name, value in terms.items() if not name.startswith("with_")}
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    weight = (torch.rand(2, 3, dtype=torch.float64) + 0.5).requires_grad_()
    target = torch.tensor([[0, 4, -100], [3, 3, 1]])

    def loss(logits: Tensor, weight: Tensor, **how: Any) -> Tensor:
        return softmax_cross_entropy(logits, target, token_weight=weight, **options, **how)

    assert torch.autograd.gradcheck(loss, (logits, weight))
    assert torch.autograd.gradcheck(lambda *given: loss(*given, reduction="none"), (logits, weight))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 4)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    logits = torch.randn(shape, requires_grad=True)
    loss = softmax_cross_entropy(logits, torch.empty(shape[:-1], dtype=torch.long))
    loss.backward()
    assert loss == 0.0
    assert logits.grad is not None
    assert logits.grad.shape == shape


def test_gradient_of_the_gradient_is_an_error_not_a_number() -> None:
    logits = torch.randn(3, 4, requires_grad=True)
    loss = softmax_cross_entropy(logits, torch.tensor([0, 1, 2]))
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="softmax_gradient"):
        gradient.square().sum().backward()


@pytest.mark.parametrize("overwrites", [False, True])
def test_runs_on_fake_tensors_of_a_real_shape(overwrites: bool) -> None:
    with FakeTensorMode():
        leaf = torch.empty(1, 8192, 128_256, dtype=torch.bfloat16, requires_grad=True)
        target = torch.empty(1, 8192, dtype=torch.long)
        loss = softmax_cross_entropy(leaf * 1.0, target, overwrite_logits=overwrites)
        loss.backward()
    assert loss.dtype == torch.float32
    assert leaf.grad is not None
    assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_follow_torchs_rules(dtype: torch.dtype) -> None:
    logits, target = torch.randn(6, 5, dtype=dtype).t().requires_grad_(), torch.tensor([0, 1, -100, 5, 2])
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(softmax_loss_op, (logits, target, -100, 0.1, 0.1, 2.0, 0.5, False), test_utils=tests)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    def step(leaf: Tensor, target: Tensor, num_items: Tensor) -> Tensor:
        return softmax_cross_entropy(leaf * 2.0, target, num_items=num_items, softcap=5.0, overwrite_logits=True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (33, 20):
        leaf, target = torch.randn(rows, 40, requires_grad=True), torch.randint(0, 40, (rows,))
        outcomes = []
        for run in (step, compiled):
            loss = run(leaf, target, torch.tensor(7))
            outcomes.append((loss, *torch.autograd.grad(loss, leaf)))
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(5, 4)}, r"found \[5, 4\] and \[6\]"),
        ({"logits": torch.zeros(6, 0)}, r"V > 0 .*found \[6, 0\]"),
        ({"logits": torch.zeros(6, 4, dtype=torch.long)}, r"floating dtype.*not torch\.int64"),
        ({"target": torch.zeros(6)}, r"class indices, found torch\.float32"),
        ({"token_weight": torch.zeros(4)}, r"token_weight \[6\], found \[4\]"),
        ({"target": torch.zeros(6, dtype=torch.long, device="meta")}, r"one device, found cpu, meta"),
        ({"reduction": "max"}, r"not 'max'"),
        ({"reduction": "sum", "num_items": 3}, r"num_items divides the mean"),
        ({"label_smoothing": -0.5}, r"between 0 and 1, not -0\.5"),
        ({"softcap": -1.0}, r"positive, not -1\.0"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    given = {"logits": torch.zeros(6, 4), "target": torch.zeros(6, dtype=torch.long), **change}
    with pytest.raises(UsageError, match=message):
        softmax_cross_entropy(**given)


def test_bytes_are_those_of_llama_3_8b() -> None:
    """Three passes over bf16 logits; eager holds ten bytes for each at its peak, two more logits in fp32."""
    size = 8192 * 128_256
    own, over = (
        cost(SoftmaxLossShape(num_rows=8192, vocabulary_size=128_256, overwrites_logits=over), torch.bfloat16, H200)
        for over in (False, True)
    )
    assert own.bytes_moved == over.bytes_moved == pytest.approx(6 * size, rel=1e-4)
    assert own.saved_bytes == over.saved_bytes == 2 * size + 8192 * 8
    assert own.transient_bytes - over.transient_bytes == 2 * size
    assert own.eager is not None
    assert (own.eager.saved_bytes, own.eager.transient_bytes) == (4 * size, 10 * size)
    assert own.seconds < own.eager.seconds / 4


@pytest.mark.parametrize("overwrites", [False, True])
def test_saved_bytes_are_what_autograd_saves(overwrites: bool) -> None:
    logits = torch.randn(24, 200, dtype=torch.bfloat16, requires_grad=True) * 1.0
    target = torch.randint(0, 200, (24,))
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() != target.untyped_storage().data_ptr() and tensor.numel() > 1:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        softmax_cross_entropy(logits, target, overwrite_logits=overwrites)
    shape = SoftmaxLossShape(num_rows=24, vocabulary_size=200, overwrites_logits=overwrites)
    assert sum(tensor.nbytes for tensor in saved.values()) == cost(shape, torch.bfloat16, H200).saved_bytes
    saved.clear()
    gc.collect()


def test_impossible_sizes_are_named() -> None:
    with pytest.raises(UsageError, match="sizes must be positive"):
        cost(SoftmaxLossShape(num_rows=4, vocabulary_size=0), torch.bfloat16, H200)
