"""`rope` against plain torch: the reference here, the kernels where test_interpreter.py runs this."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from memwall.errors import UsageError
from memwall.triton_kernels import rope

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("launches")


def tables(length: int, num_pairs: int, batch: int | None = None) -> tuple[Tensor, Tensor]:
    """Of positions that start anywhere, one row of them for each sequence where `batch` is given."""
    positions = torch.arange(length) + (3 if batch is None else 100 * torch.arange(batch)[:, None])
    angles = positions[..., None] * 10_000.0 ** (-torch.arange(num_pairs) / max(1, num_pairs))
    return angles.cos(), angles.sin()


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, sequence_dim: int = -2) -> Tensor:
    """As transformers writes it, tables that hold each number twice; computed in fp32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    num_pairs = cos.shape[-1]
    cos, sin = (
        (table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)).to(wide)
        for table in (cos, sin)
    )
    heads_dim = -3 if sequence_dim == -2 else -2
    if x.dim() > 2:
        cos, sin = (table.unsqueeze(heads_dim) for table in (cos, sin))
    rotary, rest = x[..., : 2 * num_pairs].to(wide), x[..., 2 * num_pairs :]
    if interleaved:
        turned = torch.stack((-rotary[..., 1::2], rotary[..., ::2]), -1).flatten(-2)
    else:
        turned = torch.cat((-rotary[..., num_pairs:], rotary[..., :num_pairs]), -1)
    return torch.cat(((rotary * cos + turned * sin).to(x.dtype), rest), -1)


@pytest.fixture
def check(operation: Any, poisoned: None) -> Callable[..., None]:
    """As exact as plain torch, in new memory and in place."""
    torch.manual_seed(0)

    def run(x: Tensor, cos: Tensor, sin: Tensor, **how: Any) -> None:
        def plain(x: Tensor) -> Tensor:
            return plain_rope(x, cos, sin, **how)

        operation(lambda x: rope(x, cos, sin, **how), plain).check(x)
        operation(lambda x: rope(x * 1.0, cos, sin, inplace=True, **how), plain).check(x)

    return run


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "num_pairs"), [(2, 1), (80, 16), (128, 64), (7, 3), (5, 0)])
def test_is_as_exact_as_torch(
    check: Callable[..., None], dtype: torch.dtype, interleaved: bool, head_dim: int, num_pairs: int
) -> None:
    check(torch.randn(1, 3, 2, head_dim).to(dtype), *tables(2, num_pairs), interleaved=interleaved)


@pytest.mark.parametrize("num_heads", [1, 3, 8, 33])
@pytest.mark.parametrize("sequence_dim", [-2, -3])
def test_heads_of_queries_and_of_keys(check: Callable[..., None], num_heads: int, sequence_dim: int) -> None:
    x = torch.randn(2, 3, num_heads, 64)
    check(x if sequence_dim == -3 else x.transpose(1, 2), *tables(3, 32, batch=2), sequence_dim=sequence_dim)


def test_strides(check: Callable[..., None]) -> None:
    cos, sin = tables(2, 8, batch=2)
    projected = torch.randn(2, 2, 3 * 40)
    for x, how in (
        (torch.randn(2, 3, 2, 40)[..., ::2], {"interleaved": True}),
        (torch.randn(20, 2, 3, 2).permute(3, 2, 1, 0), {}),
        (projected[..., 40:100].view(2, 2, 3, 20), {"sequence_dim": -3}),
        (projected[..., 40:100].view(2, 2, 3, 20).transpose(1, 2), {"interleaved": True}),
    ):
        assert not x.is_contiguous()
        check(x, cos, sin, **how)
    check(torch.randn(2, 1, 2, 20), cos.transpose(0, 1).contiguous().transpose(0, 1), sin.repeat(1, 1, 2)[..., :8])
    check(torch.randn(2, 3, 2, 20), *tables(2, 8, batch=1))


@pytest.mark.parametrize(("shape", "sequence_dim"), [((4, 20), -2), ((3, 4, 20), -2), ((4, 3, 20), -3)])
def test_fewer_dimensions(check: Callable[..., None], shape: tuple[int, ...], sequence_dim: int) -> None:
    check(torch.randn(shape), *tables(4, 10), sequence_dim=sequence_dim)


def test_gradient_and_input_that_were_expanded(poisoned: None) -> None:
    (cos, sin), x = tables(4, 10), torch.randn(1, 1, 1, 20, requires_grad=True)
    upstream = torch.randn(1, 3, 1, 1).expand(2, 3, 4, 20)
    found, expected = (
        torch.autograd.grad(run(x.expand(2, 3, 4, 20), cos, sin), x, upstream)[0] for run in (rope, plain_rope)
    )
    torch.testing.assert_close(found, expected)


def test_values_that_are_not_finite_come_out() -> None:
    x, (cos, sin) = torch.randn(1, 1, 3, 20), tables(3, 5)
    x[..., 0, 2], x[..., 1, 12], x[..., 2, 7] = float("nan"), float("nan"), float("inf")
    found = rope(x, cos, sin)
    assert torch.equal(found.isfinite(), plain_rope(x, cos, sin).isfinite())


def test_result_and_gradient_lie_in_memory_as_the_input_does() -> None:
    x = torch.randn(2, 4, 3, 20).transpose(1, 2).requires_grad_()
    result = rope(x, *tables(4, 10))
    result.backward(torch.randn_like(x))
    assert x.grad is not None
    assert result.stride() == x.grad.stride() == x.stride()


def test_inputs_are_never_written() -> None:
    tensors = [torch.randn(2, 3, 4, 20), *tables(4, 8), torch.randn(2, 3, 4, 20)]
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    for inplace in (False, True):
        x = tensors[0].clone().requires_grad_() * 1.0 if inplace else tensors[0].requires_grad_()
        torch.autograd.grad(rope(x, *tensors[1:3], inplace=inplace), x, tensors[3])
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)


def test_in_place_is_in_place_and_counted() -> None:
    leaf = torch.randn(2, 4, 60, requires_grad=True)
    projected = leaf * 1.0
    queries = projected[..., :40].view(2, 4, 2, 20).transpose(1, 2)
    expected, untouched = rope(queries, *tables(4, 5)), projected[..., 40:].clone()
    version = projected._version
    rotated = rope(queries, *tables(4, 5), inplace=True)
    assert rotated.data_ptr() == projected.data_ptr()
    assert torch.equal(rotated, expected)
    assert torch.equal(projected[..., 40:], untouched)
    assert projected._version > version
    (gradient,) = torch.autograd.grad(projected.square().sum(), leaf)
    torch.testing.assert_close(gradient, 2.0 * leaf)


def test_backward_twice_and_two_runs_are_bitwise_equal() -> None:
    leaf, results = torch.randn(1, 3, 2, 20, requires_grad=True), []
    for inplace in (False, True):
        loss = rope(leaf * 1.0, *tables(2, 8), inplace=inplace).pow(3).sum()
        results += [torch.autograd.grad(loss, leaf, retain_graph=True)[0], torch.autograd.grad(loss, leaf)[0]]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_who_saved_the_input_is_told_that_it_is_gone() -> None:
    """Liger #272, #273, #343 and others wrote over tensors without a word to autograd."""
    x = torch.randn(2, 3, 4, 20, requires_grad=True) * 1.0
    other = x.square().sum()
    rotated = rope(x, *tables(4, 8), inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (rotated.sum() + other).backward()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.randn(3, 4, 20, requires_grad=True), "write over a leaf that requires a gradient"),
        (lambda: torch.randn(6, 4, 20, requires_grad=True)[:3], "write over a leaf that requires a gradient"),
        (lambda: torch.randn(1, 4, 20).expand(3, 4, 20), r"memory of their own.*strides \[0, 20, 1\]"),
    ],
    ids=["leaf", "view-of-a-leaf", "expanded"],
)
def test_what_is_not_the_callers_to_give_is_refused(
    make: Callable[[], Tensor], message: str, launches: list[str]
) -> None:
    launches.append("none is wanted")
    with pytest.raises(UsageError, match=message):
        rope(make(), *tables(4, 8), inplace=True)
