"""`swiglu` and `geglu` against plain torch: the reference here, the kernels where test_interpreter.py runs this."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.triton_kernels import geglu, swiglu

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS: dict[str, tuple[Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "swiglu": (swiglu, F.silu),
    "geglu": (geglu, F.gelu),
    "geglu-tanh": (
        lambda *tensors: geglu(*tensors, approximate="tanh"),
        lambda gate: F.gelu(gate, approximate="tanh"),
    ),
}

pytestmark = pytest.mark.usefixtures("launches")


@pytest.fixture(params=KINDS)
def glu(request: pytest.FixtureRequest, operation: Any) -> Any:
    torch.manual_seed(0)
    ours, activation = KINDS[request.param]
    return operation(ours, lambda gate, up: activation(gate) * up)


@pytest.fixture(params=KINDS)
def packed_glu(request: pytest.FixtureRequest, operation: Any) -> Any:
    torch.manual_seed(0)
    ours, activation = KINDS[request.param]

    def plain(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return activation(gate) * up

    return operation(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 64, 123, 1000, 4096, 4097])
@pytest.mark.parametrize("rows", [1, 5])
def test_is_as_exact_as_torch(glu: Any, dtype: torch.dtype, rows: int, columns: int, poisoned: None) -> None:
    glu.check(*(3.0 * torch.randn(2, rows, columns)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 1000, 2100])
def test_gate_and_up_in_one_tensor(packed_glu: Any, dtype: torch.dtype, columns: int, poisoned: None) -> None:
    packed_glu.check(torch.randn(5, 2 * columns).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(operation: Any, laid_out: Callable[..., Tensor], dtype: torch.dtype) -> None:
    def packed(tensor: Tensor) -> Tensor:
        gate, up = tensor.chunk(2, -1)
        return F.silu(gate) * up

    operation(swiglu, lambda gate, up: F.silu(gate) * up).check(laid_out(33, 70).to(dtype), laid_out(33, 70).to(dtype))
    operation(swiglu, packed).check(laid_out(33, 70).to(dtype))


def test_strides_of_the_upstream_gradient(glu: Any, laid_out: Callable[..., Tensor]) -> None:
    upstream = laid_out(33, 70)
    leaves = [torch.randn(upstream.shape, requires_grad=True) for _ in range(2)]
    found, expected = (torch.autograd.grad(run(*leaves), leaves, upstream) for run in (glu.ours, glu.plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_one_dimension_and_four(glu: Any) -> None:
    glu.check(torch.randn(9), torch.randn(9))
    glu.check(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_equal_and_tiny_values(glu: Any, dtype: torch.dtype) -> None:
    shape = (3, 50)
    for gate in (torch.randn(shape) + 1e4, torch.randn(shape) - 1e4, torch.full(shape, 3.0), 1e-6 * torch.randn(shape)):
        glu.check(gate.to(dtype), torch.randn(shape).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_are_not_finite_come_out(glu: Any, dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 4, 30).to(dtype)
    gate[0, 3], gate[1, 4], gate[2, 5], up[3, 6] = float("nan"), float("inf"), float("-inf"), float("nan")
    found, expected = (glu.results(run, gate, up) for run in (glu.ours, glu.plain))
    # Nothing spreads. At a gate of minus infinity, and in the gradient of either, it is infinity times zero.
    infinite = gate.isinf()
    for ours, plain in zip(found, expected, strict=True):
        assert torch.equal(ours.isfinite() | infinite, plain.isfinite() | infinite)
    assert found[0][[0, 3], [3, 6]].isnan().all()
    assert found[0][1, 4].isinf()


def test_two_dtypes_are_promoted(glu: Any) -> None:
    glu.check(torch.randn(5, 40).bfloat16(), torch.randn(5, 40))
    glu.check(torch.randn(5, 40), torch.randn(5, 40).half())


def test_inputs_are_never_written(glu: Any) -> None:
    tensors = [*torch.randn(2, 5, 40), torch.randn(5, 40)]
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    glu.results(glu.ours, *tensors[:2])
    glu.results(glu.ours, tensors[2])
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)


def test_backward_twice_and_two_runs_are_bitwise_equal(glu: Any) -> None:
    leaves = [torch.randn(5, 300, requires_grad=True) for _ in range(2)]
    results = []
    for _ in range(2):
        loss = glu.ours(*leaves).square().sum()
        results += [torch.autograd.grad(loss, leaves, retain_graph=True), torch.autograd.grad(loss, leaves)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_in_place_change_between_forward_and_backward_is_noticed(glu: Any) -> None:
    """Liger #272, #273, #343 and others: autograd's own check must keep working."""
    leaves = [torch.randn(5, 30, requires_grad=True) for _ in range(2)]
    gate = leaves[0] * 2.0
    product = glu.ours(gate, leaves[1])
    gate.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_autocast_leaves_dtypes_alone_as_it_does_for_eager(glu: Any) -> None:
    gate, up = torch.randn(2, 5, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert glu.ours(gate, up).dtype == glu.plain(gate, up).dtype == torch.float32
        assert glu.ours(gate.bfloat16(), up.bfloat16()).dtype == torch.bfloat16
