"""`swiglu` and `geglu`: what needs no kernel: mistakes, fake tensors, and torch's rules for operators."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.triton_kernels import geglu, swiglu
from memwall.triton_kernels.glu import activations as module


@pytest.mark.slow
@pytest.mark.parametrize("approximate", [None, "none", "tanh"])
def test_gradients_by_finite_differences(approximate: Any) -> None:
    def run(*tensors: Tensor) -> Tensor:
        return swiglu(*tensors) if approximate is None else geglu(*tensors, approximate=approximate)

    leaves = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradcheck(run, leaves[:1])


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    leaves = [torch.randn(shape, requires_grad=True) for _ in range(2)]
    for given in (leaves, leaves[:1]):
        product = swiglu(*given)
        product.sum().backward()
        assert product.shape == (shape if len(given) == 2 else (*shape[:-1], shape[-1] // 2))
    assert leaves[1].grad is not None
    assert leaves[1].grad.shape == shape


def test_gradient_of_the_gradient_is_an_error_not_a_number() -> None:
    leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    for given in (leaves, leaves[:1]):
        (gradient, *_) = torch.autograd.grad(swiglu(*given).sum(), given, create_graph=True)
        with pytest.raises(RuntimeError, match="glu_backward"):
            gradient.square().sum().backward()


def test_runs_on_fake_tensors_of_a_real_shape() -> None:
    with FakeTensorMode():
        gate, up = (torch.empty(1, 8192, 14_336, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        swiglu(gate, up).sum().backward()
        packed = torch.empty(1, 8192, 28_672, dtype=torch.bfloat16, requires_grad=True)
        product = geglu(packed)
        product.sum().backward()
    assert (product.shape, product.dtype) == (gate.shape, gate.dtype)
    for leaf in (gate, up, packed):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_operators_follow_torchs_rules(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    gate, up = (torch.randn(6, 5, dtype=dtype).t().requires_grad_() for dtype in dtypes)
    packed = torch.randn(5, 6, dtype=dtypes[0]).requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(module.glu_op, (gate, up, "gelu"), test_utils=tests)
    torch.library.opcheck(module.packed_glu_op, (packed, "silu"), test_utils=tests)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    compiled = torch.compile(lambda *ts: swiglu(*ts) * 2.0, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (33, 20):
        leaves = [torch.randn(rows, 40, requires_grad=True) for _ in range(2)]
        found = torch.autograd.grad(compiled(*leaves).sum(), leaves)
        expected = torch.autograd.grad((swiglu(*leaves) * 2.0).sum(), leaves)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((torch.zeros(2, 3), torch.zeros(3, 2)), r"one shape \[\.\.\., I\].*found \[2, 3\] on cpu and \[3, 2\] on cpu"),
        ((torch.zeros(2, 3), torch.zeros(2, 3, device="meta")), r"on one device.*on meta"),
        ((torch.zeros(2, 3),), r"wants \[\.\.\., 2 I\].*found \[2, 3\]"),
        ((torch.zeros(()), torch.zeros(())), r"found \[\] on cpu"),
        ((torch.zeros(2, 4, dtype=torch.long),), r"floating dtypes.*found torch\.int64"),
    ],
)
def test_mistakes_are_named(given: tuple[Tensor, ...], message: str) -> None:
    for run in (swiglu, geglu):
        with pytest.raises(UsageError, match=f"^{run.__name__} .*{message}"):
            run(*given)
    with pytest.raises(UsageError, match=r"'none' or 'tanh', not 'sigmoid'"):
        geglu(*given, approximate="sigmoid")  # type: ignore[arg-type]
