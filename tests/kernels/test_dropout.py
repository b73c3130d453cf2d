"""`dropout`: the reference here, the kernel where test_interpreter.py runs this. Both draw one mask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from memwall.triton_kernels import dropout
from memwall.triton_kernels._philox import random_bits

DTYPES = [torch.float32, torch.float16, torch.bfloat16]

pytestmark = pytest.mark.usefixtures("launches")


def factor(shape: torch.Size, p: float, seed: int, site: int = 0) -> Tensor:
    """What each element is multiplied with, from the generator itself."""
    threshold = round(p * 65_536)
    bits = random_bits(seed, 0, shape.numel(), site, 0, torch.device("cpu")).view(shape)
    return (bits >= threshold) * (65_536 / (65_536 - threshold))


def plain_dropout(x: Tensor, residual: Tensor | None, mask: Tensor) -> Tensor:
    """In fp32 at least, rounded once."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    kept = x.to(wide) * mask.to(wide)
    return (kept if residual is None else kept + residual.to(wide)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 2049])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_bits_are_those_of_the_mask(dtype: torch.dtype, columns: int, p: float, poisoned: None) -> None:
    """Result and gradients have no other bits than plain torch with that mask."""
    torch.manual_seed(0)
    x, residual, upstream = torch.randn(3, 3, columns).to(dtype).unbind()
    mask = factor(x.shape, p, 11)
    for tensors in ((x,), (x, residual)):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        added = leaves[1] if len(leaves) == 2 else None
        found = dropout(leaves[0], p, residual=added, seed=11)
        expected = plain_dropout(leaves[0], added, mask)
        assert found.dtype == dtype
        assert torch.equal(found, expected)
        gradients = (torch.autograd.grad(result, leaves, upstream) for result in (found, expected))
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_strides_change_no_bit(laid_out: Callable[..., Tensor]) -> None:
    x, residual = laid_out(9, 70), laid_out(9, 70)
    mask = factor(x.shape, 0.3, 5)
    assert torch.equal(dropout(x, 0.3, residual=residual, seed=5), plain_dropout(x, residual, mask))
    assert torch.equal(dropout(x.contiguous(), 0.3, residual=residual, seed=5), plain_dropout(x, residual, mask))
    leaf = torch.randn(x.shape, requires_grad=True)
    (gradient,) = torch.autograd.grad(dropout(leaf, 0.3, seed=5), leaf, x)
    assert torch.equal(gradient, plain_dropout(x, None, mask))


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4, 5)])
def test_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert torch.equal(dropout(x, 0.4, seed=2), plain_dropout(x, None, factor(x.shape, 0.4, 2)))


def test_two_dtypes_are_promoted() -> None:
    for dtypes in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        x, residual = (torch.randn(5, 40).to(dtype).requires_grad_() for dtype in dtypes)
        found = dropout(x, 0.5, residual=residual, seed=3)
        assert torch.equal(found, plain_dropout(x, residual, factor(x.shape, 0.5, 3)))
        gradients = torch.autograd.grad(found, (x, residual), torch.ones_like(found))
        assert tuple(gradient.dtype for gradient in gradients) == dtypes


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_share_and_mean_are_those_of_the_probability(p: float) -> None:
    found = dropout(torch.ones(32, 1024), p, seed=17)
    share = float((found == 0.0).float().mean())
    sigma = (p * (1.0 - p) / found.numel()) ** 0.5
    assert abs(share - p) < 4.0 * sigma
    assert abs(float(found.mean()) - 1.0) < 4.0 * sigma / (1.0 - p)


def test_seeds_and_sites_draw_masks_of_their_own() -> None:
    ones = torch.ones(8192)
    masks = [dropout(ones, 0.5, seed=seed, site=site) for seed, site in ((1, 0), (2, 0), (1, 1), (1 + (1 << 40), 0))]
    masks += [masks[0].roll(8), dropout(ones, 0.5, seed=(1 << 63) - 1, site=(1 << 32) - 1)]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert float((mask == other).float().mean()) == pytest.approx(0.5, abs=0.04)
    assert torch.equal(masks[0], dropout(ones, 0.5, seed=torch.tensor(1)))


def test_without_a_seed_torchs_generator_gives_one() -> None:
    ones = torch.ones(1000)
    torch.manual_seed(4)
    first, second = dropout(ones), dropout(ones)
    torch.manual_seed(4)
    assert torch.equal(dropout(ones), first)
    assert not torch.equal(first, second)


def test_a_checkpointed_block_draws_the_same_mask_again() -> None:
    leaf = torch.randn(4, 100, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return dropout(x, 0.5).square()

    torch.manual_seed(7)
    (expected,) = torch.autograd.grad(block(leaf).sum(), leaf)
    torch.manual_seed(7)
    (found,) = torch.autograd.grad(checkpoint(block, leaf, use_reentrant=False).sum(), leaf)
    assert torch.equal(found, expected)


def test_all_and_nothing_dropped(launches: list[str]) -> None:
    x, residual = torch.randn(2, 5, 40)
    assert dropout(x, 0.5, training=False) is x
    assert dropout(x, 0.0) is x
    assert torch.equal(dropout(x, 0.5, residual=residual, training=False), x + residual)
    assert torch.equal(dropout(x, 1.0, residual=residual, seed=1), residual)
    # Below half of 2^-16.
    assert torch.equal(dropout(x, 1e-6, seed=1), x)


def test_values_that_are_not_finite_come_out_also_where_they_are_dropped() -> None:
    x = torch.full((64,), float("nan"))
    x[::2] = float("inf")
    found = dropout(x, 0.5, seed=9)
    assert not found.isfinite().any()


def test_nothing_but_the_seed_is_kept() -> None:
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    x = torch.randn(5, 40, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout(x, 0.5, residual=x)
    assert saved == [8]


def test_inputs_are_never_written() -> None:
    tensors: list[Any] = [*torch.randn(3, 5, 40), torch.tensor(3)]
    before = [(tensor._version, tensor.clone()) for tensor in tensors]
    x, residual = (tensor.detach().requires_grad_() for tensor in tensors[:2])
    result = dropout(x, 0.5, residual=residual, seed=tensors[3])
    torch.autograd.grad(result, (x, residual), tensors[2])
    for tensor, (version, copy) in zip(tensors, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, copy)


def test_backward_twice_and_two_runs_are_bitwise_equal() -> None:
    leaf, results = torch.randn(5, 300, requires_grad=True), []
    for _ in range(2):
        loss = dropout(leaf, 0.5, seed=1).pow(3).sum()
        results += [torch.autograd.grad(loss, leaf, retain_graph=True)[0], torch.autograd.grad(loss, leaf)[0]]
    assert all(torch.equal(results[0], other) for other in results[1:])
