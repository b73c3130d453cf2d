"""The norm: what needs no kernel: mistakes, fake tensors, and torch's rules for operators."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.triton_kernels import rms_norm
from memwall.triton_kernels.norms import _ops as ops


@pytest.mark.parametrize("casting", ["llama", "gemma", "plain"])
def test_gradients_by_finite_differences(casting: Any) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    w = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, casting=casting), (x, w))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    x, w = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    y = rms_norm(x, w)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape


def test_weights_of_no_rows_get_zeros_as_gradient() -> None:
    w = torch.randn(4, requires_grad=True)
    rms_norm(torch.randn(0, 4), w).sum().backward()
    assert w.grad is not None
    assert not w.grad.any()


def test_gradient_of_the_gradient_is_an_error_not_a_number() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(rms_norm(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="norm_backward"):
        gradient.square().sum().backward()


def test_runs_on_fake_tensors_of_a_real_shape() -> None:
    with FakeTensorMode():
        x = torch.empty(1, 8192, 4096, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(4096, requires_grad=True)
        y, normed = rms_norm(x, w), rms_norm(x, w, casting="plain")
        (y.sum() + normed.sum()).backward()
    assert (y.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    for leaf in (x, w):
        assert leaf.grad is not None
        assert (leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, leaf.dtype)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
def test_operators_follow_torchs_rules(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x = torch.randn(6, 5, dtype=dtypes[0]).t().requires_grad_()
    w = torch.randn(6, dtype=dtypes[1]).requires_grad_()
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.norm_op, (x, w, 1e-5, "plain", dtypes[0]), test_utils=tests)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    def step(x: Tensor, w: Tensor) -> Tensor:
        return rms_norm(rms_norm(x * 2.0, w) + x, w, casting="gemma")

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    w = torch.randn(40, requires_grad=True)
    for rows in (33, 20):
        x = torch.randn(rows, 40, requires_grad=True)
        found, expected = (torch.autograd.grad(run(x, w).square().sum(), (x, w)) for run in (compiled, step))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: rms_norm(x, torch.zeros(3)), r"rms_norm wants weight \[4\] on cpu, found \[3\] on cpu"),
        (lambda x: rms_norm(x, torch.zeros(4, device="meta")), r"wants weight \[4\] on cpu, found \[4\] on meta"),
        (lambda x: rms_norm(x.long()), r"floating dtypes.*found torch\.int64"),
        (lambda x: rms_norm(x.sum()), r"rms_norm wants x \[\.\.\., H\], found a scalar"),
        (lambda x: rms_norm(x, casting="liger"), r"one of llama, gemma, plain, not 'liger'"),
    ],
)
def test_mistakes_are_named(run: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(torch.zeros(2, 4))
