"""The norm against plain torch: the reference, which is what a CPU runs; test_cuda_fused.py has the GPU's half."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.triton_kernels import rms_norm
from memwall.triton_kernels.norms import _fused, _ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6
pytestmark = pytest.mark.usefixtures("one_thread")


def normalised(x: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


PLAIN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "llama": lambda x, w: w * normalised(x).to(x.dtype),
    "gemma": lambda x, w: (normalised(x) * (1.0 + w.to(normalised(x).dtype))).to(x.dtype),
    "plain": lambda x, w: (normalised(x) * w.to(normalised(x).dtype)).to(x.dtype),
}


def rms(casting: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, w: rms_norm(x, w, eps=EPS, casting=casting)


@pytest.fixture(params=PLAIN)
def casting(request: pytest.FixtureRequest) -> str:
    torch.manual_seed(0)
    return str(request.param)


@pytest.fixture
def norm(casting: str, operation: Any) -> Any:
    return operation(rms(casting), PLAIN[casting])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 64, 123, 1000, 4097, 9001])
def test_is_as_exact_as_torch(norm: Any, dtype: torch.dtype, columns: int, poisoned: None) -> None:
    norm.check(torch.randn(5, columns).to(dtype), torch.randn(columns).to(dtype))


@pytest.mark.parametrize("rows", [1, 2, 33])
def test_rows(norm: Any, rows: int, poisoned: None) -> None:
    norm.check(torch.randn(rows, 60), torch.randn(60))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(operation: Any, laid_out: Callable[..., Tensor], dtype: torch.dtype) -> None:
    operation(rms("llama"), PLAIN["llama"]).check(laid_out(33, 70).to(dtype), torch.randn(140)[::2].to(dtype))


def test_without_weight(operation: Any) -> None:
    torch.manual_seed(0)
    operation(rms_norm, normalised).check(torch.randn(5, 300))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_common_offset_and_equal_values(norm: Any, dtype: torch.dtype) -> None:
    for columns in (200, 9001):
        # Rows enough that none decides by luck: a mean of 10,000 in fp32 is exact to a thousandth.
        shifted = (torch.randn(33, columns) + 1e4).to(dtype)
        norm.check(shifted, torch.randn(columns).to(dtype))
        norm.check(torch.full((3, columns), 3.0, dtype=dtype), torch.randn(columns).to(dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_spoil_their_row_only(norm: Any, value: float) -> None:
    x = torch.randn(5, 300)
    x[3, 7] = value
    found, expected = (norm.results(run, x, torch.randn(300))[:2] for run in (norm.ours, norm.plain))
    assert [t.isnan().any(1).tolist() for t in found] == [t.isnan().any(1).tolist() for t in expected]
    assert torch.equal(found[0].isnan(), expected[0].isnan())


def test_weight_of_another_dtype(operation: Any, casting: str) -> None:
    """Mixed precision: activations in 16 bits, weights in 32. llama's result is promoted, gemma's is not."""
    operation(rms(casting), PLAIN[casting]).check(torch.randn(5, 300).bfloat16(), torch.randn(300))


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_a_frozen_input_gets_no_gradient(frozen: str) -> None:
    torch.manual_seed(0)
    given = {"x": torch.randn(5, 30), "weight": torch.randn(30)}
    leaves = [tensor.requires_grad_() for name, tensor in given.items() if name != frozen]
    found = torch.autograd.grad(rms("plain")(*given.values()).square().sum(), leaves)
    expected = torch.autograd.grad(PLAIN["plain"](*given.values()).square().sum(), leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_inputs_are_never_written(casting: str) -> None:
    tensors = [torch.randn(5, 40), torch.randn(40)]
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    rms(casting)(*leaves).square().sum().backward()
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)


def test_backward_twice_and_two_runs_are_bitwise_equal(casting: str) -> None:
    x, w = torch.randn(33, 300, requires_grad=True), torch.randn(300, requires_grad=True)
    results = []
    for _ in range(2):
        loss = (rms(casting)(x, w) * x).sum()
        results += [torch.autograd.grad(loss, (x, w), retain_graph=keep) for keep in (True, False)]
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_in_place_change_between_forward_and_backward_is_noticed() -> None:
    """Liger #272, #273, #343 and others: autograd's own check must keep working."""
    x, w = torch.randn(5, 30, requires_grad=True), torch.randn(30, requires_grad=True)
    doubled = x * 2.0
    y = rms_norm(doubled, w)
    doubled.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def backward_of_torchs(
    grad: Tensor, x: Tensor, shape: Any, rstd: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor | None]:
    """As torch's kernel for CUDA computes it, which a CPU does not have; each result is rounded once."""
    assert grad.dtype == x.dtype == weight.dtype
    wide, normed = grad.float() * weight.float(), x.float() * rstd
    of_x = rstd * (wide - normed * (wide * normed).mean(-1, keepdim=True))
    return of_x.to(x.dtype), (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype) if mask[1] else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=str)
def test_the_half_of_a_gpu(
    norm: Any, dtype: torch.dtype, weight_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN torch's kernels for CUDA WHEN they compute the norm THEN it is as exact as the model's own."""
    monkeypatch.setattr(_ops, "_is_fused", lambda x: x.dtype != torch.float64)
    monkeypatch.setattr(_fused, "_BACKWARD", backward_of_torchs)
    for shape in ((5, 300), (2, 3, 1000)):
        norm.check(torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(weight_dtype or dtype))


def test_a_weight_that_is_frozen_has_no_gradient_on_a_gpu_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ops, "_is_fused", lambda x: True)
    monkeypatch.setattr(_fused, "_BACKWARD", backward_of_torchs)
    x, w = torch.randn(5, 30, requires_grad=True), torch.randn(30)
    (found,) = torch.autograd.grad(rms("llama")(x, w).square().sum(), x)
    (expected,) = torch.autograd.grad(PLAIN["llama"](x, w).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
