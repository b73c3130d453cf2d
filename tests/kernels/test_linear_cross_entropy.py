"""The loss without logits, on the CPU: its reference path, which shares everything but the row kernel with the GPU."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from memwall.errors import UsageError
from memwall.triton_kernels import linear_cross_entropy
from memwall.triton_kernels.scaled_copy import scaled_copy

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def storage_bytes(tensor: Tensor) -> bytes:
    return pickle.dumps(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_is_as_exact_as_torch(losses: Any, terms: dict[str, Any], dtype: torch.dtype, poisoned: None) -> None:
    for reduction in ("mean", "sum", "none"):
        losses.check(losses.make(dtype=dtype, reduction=reduction, **terms))


@pytest.mark.parametrize("ignored", ["none", "some", "all"])
@pytest.mark.parametrize("chunk_rows", [1, 7, 128])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_chunks_and_ignored_rows(losses: Any, ignored: str, chunk_rows: int, reduction: str, poisoned: None) -> None:
    losses.check(losses.make(ignored=ignored, how={"chunk_rows": chunk_rows}, with_bias=True, reduction=reduction))


@pytest.mark.parametrize("rows", [0, 1, 5, 33])
@pytest.mark.parametrize("vocabulary", [1, 7, 64, 4097])
def test_odd_sizes(losses: Any, rows: int, vocabulary: int, poisoned: None) -> None:
    losses.check(losses.make(rows=rows, vocabulary=vocabulary, with_bias=True, label_smoothing=0.1))


def test_gradients_by_finite_differences(losses: Any, terms: dict[str, Any]) -> None:
    p = losses.make(rows=6, hidden=3, vocabulary=5, dtype=torch.float64, **terms)
    leaves = [t.requires_grad_() for t in (p.x, p.w, p.bias) if t is not None]

    def loss(x: Tensor, w: Tensor, bias: Tensor | None = None, **how: Any) -> Tensor:
        return linear_cross_entropy(x, w, p.target, bias=bias, chunk_rows=4, **p.options, **how)

    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradcheck(lambda *args: loss(*args, reduction="none"), leaves)


@pytest.mark.parametrize(
    "layout", ["sliced", "transposed", "expanded", "weight-transposed", "weight-strided", "target"]
)
def test_strides(losses: Any, layout: str) -> None:
    torch.manual_seed(0)
    p = losses.make()
    rows, hidden = p.x.shape
    changed = {
        "sliced": {"x": torch.randn(rows, 2 * hidden)[:, ::2]},
        "transposed": {"x": torch.randn(hidden, rows).t()},
        "expanded": {"x": torch.randn(1, hidden).expand(rows, hidden)},
        "weight-transposed": {"w": torch.randn(hidden, p.w.shape[0]).t()},
        "weight-strided": {"w": torch.randn(2 * p.w.shape[0], 2 * hidden)[::2, ::2]},
        "target": {"target": p.target.repeat_interleave(2)[::2]},
    }[layout]
    p = replace(p, **changed)
    assert not all(t.is_contiguous() for t in (p.x, p.w, p.target))
    losses.check(p)


def test_targets_of_32_bits(losses: Any) -> None:
    p = losses.make()
    narrow = linear_cross_entropy(p.x, p.w, p.target.to(torch.int32))
    assert torch.equal(narrow, linear_cross_entropy(p.x, p.w, p.target))


def test_upstream_gradient_without_strides(losses: Any) -> None:
    p = losses.make(reduction="none")
    x = p.x.requires_grad_()
    linear_cross_entropy(x, p.w, p.target, reduction="none").backward(torch.tensor(2.0).expand(33))
    (expected,) = torch.autograd.grad(2 * linear_cross_entropy(x, p.w, p.target, reduction="sum"), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inputs_are_never_written(losses: Any, reduction: str) -> None:
    p = losses.make(with_bias=True, reduction=reduction)
    tensors = [p.x, p.w, p.target, p.bias]
    before = [(t._version, storage_bytes(t)) for t in tensors]
    losses.ours(p)
    assert [(t._version, storage_bytes(t)) for t in tensors] == before


def test_backward_twice_with_retained_graph(losses: Any) -> None:
    for reduction in ("mean", "none"):
        p = losses.make(reduction=reduction)
        x, w = p.x.requires_grad_(), p.w.requires_grad_()
        loss = linear_cross_entropy(x, w, p.target, reduction=reduction).sum()
        first = torch.autograd.grad(loss, (x, w), retain_graph=True)
        second = torch.autograd.grad(loss, (x, w))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradient_of_the_gradient_is_an_error_not_a_number(losses: Any) -> None:
    p = losses.make()
    x = p.x.requires_grad_()
    for reduction in ("mean", "none"):
        loss = linear_cross_entropy(x, p.w, p.target, reduction=reduction).sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"scaled_copy|linear_cross_entropy"):
            gradient.square().sum().backward()


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("num_elements", [0, 1, 2047, 5000])
def test_scaled_gradients_are_rounded_once(dtype: torch.dtype, num_elements: int, poisoned: None) -> None:
    source = torch.randn(num_elements)
    source[:1] = float("nan")
    factor = torch.tensor(1.0 / 8191)
    for values in (source, source.to(dtype)):
        found = scaled_copy(values, factor, dtype)
        torch.testing.assert_close(found, (values.float() * factor).to(dtype), rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_runs_are_bitwise_equal(losses: Any, dtype: torch.dtype) -> None:
    p = losses.make(dtype=dtype, with_bias=True)
    first, second = losses.ours(p), losses.ours(p)
    assert torch.equal(first.loss, second.loss)
    assert all(torch.equal(gradient, second.gradients[name]) for name, gradient in first.gradients.items())


def test_values_that_are_not_finite_come_out(losses: Any) -> None:
    p = losses.make(ignored="none", reduction="none")
    p.x[2, 0] = float("nan")
    p.x[4, 0] = float("inf")
    found = losses.ours(p)
    expected = losses.plain(p)
    assert found.loss[[2, 4]].isnan().all()
    assert torch.equal(found.loss.isnan(), expected.loss.isnan())
    assert torch.equal(found.gradients["x"].isnan(), expected.gradients["x"].isnan())


def test_vocabulary_masked_by_minus_infinity(losses: Any) -> None:
    p = losses.make(with_bias=True, ignored="none")
    p.bias[60:] = float("-inf")
    losses.check(replace(p, target=p.target % 60))


def test_target_out_of_range_is_nan_in_its_row_only(losses: Any) -> None:
    p = losses.make(ignored="none")
    p.target[3], p.target[9] = 123, -1
    x = p.x.requires_grad_()
    loss = linear_cross_entropy(x, p.w, p.target, reduction="none")
    loss.sum().backward()
    bad = torch.zeros(33, dtype=torch.bool)
    bad[[3, 9]] = True
    assert torch.equal(loss.isnan(), bad)
    assert torch.equal(x.grad.isnan().all(1), bad)


def test_autocast_casts_what_a_linear_layer_would(losses: Any) -> None:
    p = losses.make(with_bias=True)
    leaves = [t.requires_grad_() for t in (p.x, p.w, p.bias)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_cross_entropy(*leaves[:2], p.target, bias=leaves[2])
    cast = [t.detach().bfloat16() for t in leaves]
    expected = linear_cross_entropy(*cast[:2], p.target, bias=cast[2])
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    assert [g.dtype for g in torch.autograd.grad(found, leaves)] == [torch.float32] * 3


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles_without_graph_breaks(losses: Any, reduction: Any) -> None:
    p = losses.make(with_bias=True)

    def step(x: Tensor, w: Tensor, target: Tensor, bias: Tensor) -> Tensor:
        rows = linear_cross_entropy(x * 2.0, w, target, bias=bias, softcap=5.0, chunk_rows=8, reduction=reduction)
        return rows.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in (p.x, p.w, p.bias)]
    for rows in (33, 20):
        outcomes = []
        for run in (step, compiled):
            loss = run(leaves[0][:rows], leaves[1], p.target[:rows], leaves[2])
            outcomes.append((loss, *torch.autograd.grad(loss, leaves)))
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_runs_on_fake_tensors_of_a_real_shape(reduction: Any) -> None:
    with FakeTensorMode():
        x = torch.empty(8192, 4096, dtype=torch.bfloat16, requires_grad=True)
        w = torch.empty(128_256, 4096, dtype=torch.bfloat16, requires_grad=True)
        loss = linear_cross_entropy(x, w, torch.empty(8192, dtype=torch.int64), reduction=reduction)
        loss.sum().backward()
    assert (loss.shape, loss.dtype) == ((8192,) if reduction == "none" else (), torch.float32)
    assert (x.grad.shape, x.grad.dtype, w.grad.shape, w.grad.dtype) == (x.shape, x.dtype, w.shape, w.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operators_follow_torchs_rules(losses: Any, dtype: torch.dtype) -> None:
    from memwall.triton_kernels.linear_cross_entropy import _ops as ops

    p = losses.make(dtype=dtype, with_bias=True)
    leaves = [t.requires_grad_() for t in (p.x, p.w, p.bias)]
    options = (-100, 0.1, 0.0, 1.0, 8, True, True, True)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    for op in (ops.sum_op, ops.rows_op):
        torch.library.opcheck(op, (*leaves[:2], p.target, leaves[2], *options), test_utils=tests)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 3, 4)}, r"x \[M, H\].*found \[2, 3, 4\].*x\.reshape"),
        ({"w": torch.zeros(5, 9)}, r"found \[6, 4\] and \[5, 9\]"),
        ({"w": torch.zeros(5, 4, dtype=torch.bfloat16)}, r"found torch\.float32, torch\.bfloat16; cast them"),
        ({"target": torch.zeros(6)}, r"class indices, found torch\.float32"),
        ({"target": torch.zeros(7, dtype=torch.long)}, r"target \[6\], found \[7\]"),
        ({"bias": torch.zeros(4)}, r"bias \[5\], found \[4\]"),
        ({"reduction": "max"}, r"not 'max'"),
        ({"label_smoothing": 1.5}, r"between 0 and 1, not 1\.5"),
        ({"softcap": 0.0}, r"positive, not 0\.0"),
        ({"chunk_rows": 0}, r"at least 1, not 0"),
    ],
)
def test_mistakes_are_named(change: dict[str, Any], message: str) -> None:
    given = {"x": torch.zeros(6, 4), "w": torch.zeros(5, 4), "target": torch.zeros(6, dtype=torch.long), **change}
    with pytest.raises(UsageError, match=message):
        linear_cross_entropy(**given)
