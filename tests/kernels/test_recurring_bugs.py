"""Bugs that keep coming back in libraries of fused losses, each with where it bit; the issue numbers are theirs.

Elsewhere are those of a head read outside of its module and of models nobody knows (tests/apply/test_kernels.py), of
32-bit offsets (test_rules.py and interpreted/), and of a device that is not the current one (test_cuda.py).
"""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.triton_kernels import linear_cross_entropy

MATMULS = ("mm", "addmm")


class Recorder(TorchDispatchMode):
    """Multiply-adds of the matmuls, and the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[int] = []
        self.largest_elements = 0
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in MATMULS:
            first, second = args[-2:] if name == "mm" else args[1:3]
            self.products.append(first.shape[0] * first.shape[1] * second.shape[1])
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.largest_elements = max(self.largest_elements, tensor.untyped_storage().nbytes() // tensor.itemsize)
                self.made.add(tuple(tensor.shape))
        return result


def recorded(p: Any, frozen: tuple[str, ...] = (), chunk_rows: int = 8) -> Recorder:
    """Forward and backward of the operators' own code, which a dispatch mode outside of them does not see."""
    from memwall.triton_kernels.linear_cross_entropy._ops import sum_op

    wanted = [name not in frozen for name in ("x", "w")]
    with Recorder() as recorder:
        sum_op._init_fn(p.x, p.w, p.target, None, -100, 0.0, 0.0, 1.0, chunk_rows, *wanted, False)
    return recorder


def test_upstream_gradients_of_reduction_none_reach_the_head(losses: Any) -> None:
    """Liger #968, #1298: they differ from row to row, and from 1."""
    losses.check(losses.make(reduction="none"))


def test_one_step_of_n_micro_batches_is_n_steps_of_one(losses: Any) -> None:
    """Liger #802, #322; TRL #5890; transformers #42444: micro-batches with different numbers of valid rows."""
    p = losses.make(dtype=torch.float64)
    num_items = (p.target != -100).sum()
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    whole = torch.autograd.grad(linear_cross_entropy(x, w, p.target), (x, w))
    parts = [slice(0, 5), slice(5, 6), slice(6, 33)]
    loss = sum(linear_cross_entropy(x[part], w, p.target[part], reduction="sum") for part in parts) / num_items
    for a, b in zip(torch.autograd.grad(loss, (x, w)), whole, strict=True):
        torch.testing.assert_close(a, b)


def test_a_micro_batch_without_a_valid_row_is_zero(losses: Any) -> None:
    """Liger #322's neighbour: 0 / 0."""
    found = losses.ours(losses.make(ignored="all", with_bias=True))
    assert found.loss == 0.0
    assert all(not gradient.any() for gradient in found.gradients.values())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_heads_gradient_does_not_lose_small_contributions(losses: Any, dtype: torch.dtype) -> None:
    """Liger #512, #827; CCE #14; OLMo-core #370: its error is checked, over many chunks, not only the loss."""
    losses.check(losses.make(rows=2048, hidden=8, vocabulary=16, dtype=dtype, ignored="none", how={"chunk_rows": 1}))


def test_fp16_gradients_neither_underflow_nor_overflow(losses: Any) -> None:
    """GradScaler multiplies what comes from above: gradients divided by num_items in forward would be gone by then."""
    p = losses.make(rows=4096, hidden=4, vocabulary=8, dtype=torch.float16, ignored="none")
    p = replace(p, x=p.x * 20, target=torch.zeros_like(p.target))
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    loss = linear_cross_entropy(x, w, p.target, chunk_rows=4096, reduction="sum") / 1e9
    got = torch.autograd.grad(loss * 2.0**20, (x, w))
    wide = [t.detach().double().requires_grad_() for t in (x, w)]
    truth = torch.autograd.grad(linear_cross_entropy(*wide, p.target, reduction="sum") / 1e9 * 2.0**20, wide)
    for a, b in zip(got, truth, strict=True):
        assert float((a.double() - b).square().mean().sqrt() / b.square().mean().sqrt()) < 5e-3


def test_upstream_gradient_is_not_rounded_to_the_inputs_dtype(losses: Any) -> None:
    """1 / num_items in bf16 is off by up to 0.4 %, the same way in every gradient."""
    p = losses.make(dtype=torch.bfloat16, ignored="none")
    found = []
    for leaves in ([p.x.clone(), p.w.clone()], [p.x.double(), p.w.double()]):
        loss = linear_cross_entropy(*(leaf.requires_grad_() for leaf in leaves), p.target, reduction="sum")
        found.append(torch.autograd.grad(loss / 8191.0, leaves))
    for ours, truth in zip(*found, strict=True):
        slope = (ours.double() * truth).sum() / truth.square().sum()
        assert abs(slope - 1.0) < 1e-3


def test_frozen_head_costs_no_gradient_of_the_head(losses: Any) -> None:
    """FLA #1253: 4 M H V FLOPs and no buffer, not 6."""
    p = losses.make(ignored="none", hidden=9)
    size = 33 * 9 * 123
    assert sum(recorded(p).products) == 3 * size
    frozen = recorded(p, frozen=("w",))
    assert sum(frozen.products) == 2 * size
    assert p.w.shape not in frozen.made
    losses.check(p, frozen=("w",))
    losses.check(replace(p, options={"reduction": "none"}), frozen=("w",))


def test_frozen_input_costs_no_gradient_of_the_input(losses: Any) -> None:
    p = losses.make(ignored="none")
    assert sum(recorded(p, frozen=("x",)).products) == 2 * 33 * 24 * 123
    losses.check(p, frozen=("x",))


def test_evaluation_computes_nothing_for_backward(losses: Any) -> None:
    p = losses.make(ignored="none")
    assert sum(recorded(p, frozen=("x", "w")).products) == 33 * 24 * 123
    x = p.x.requires_grad_()
    with torch.no_grad():
        assert not linear_cross_entropy(x, p.w, p.target).requires_grad


def test_ignored_rows_are_not_projected(losses: Any) -> None:
    """Liger projects them and zeroes the result."""
    p = losses.make(hidden=9)
    num_valid = int((p.target != -100).sum())
    assert 0 < num_valid < 33
    assert sum(recorded(p).products) == 3 * num_valid * 9 * 123
    assert sum(recorded(losses.make(ignored="all")).products) == 0


def test_the_chunk_is_the_callers_and_logits_are_never_whole(losses: Any) -> None:
    """Liger #1190, #1439, #1472; TRL #5829: wide chunks ran out of memory, and nobody could say so."""
    p = losses.make(rows=256, hidden=4, vocabulary=1000, ignored="none")
    for chunk_rows in (8, 64):
        slab_elements = chunk_rows * 1024
        assert recorded(p, chunk_rows=chunk_rows).largest_elements <= slab_elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_that_nobody_wrote_is_in_no_gradient(losses: Any, dtype: torch.dtype) -> None:
    """oneDNN's product of bfloat16 matrices reads between the rows of its left one, where the logits end unaligned."""
    p = losses.make(rows=33, vocabulary=97, dtype=dtype, reduction="none", ignored="none")
    x = p.x.requires_grad_()
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills new memory with NaN
    try:
        loss = linear_cross_entropy(x, p.w, p.target, reduction="none", chunk_rows=33)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_the_chunk_changes_no_loss_of_a_row(losses: Any) -> None:
    """Liger #1472: a new chunk changed a convergence test; here only the head's gradient is summed in another order."""
    p = losses.make(dtype=torch.bfloat16, reduction="none", ignored="none")
    x = p.x.requires_grad_()
    found = []
    for chunk_rows in (11, 33):
        loss = linear_cross_entropy(x, p.w, p.target, reduction="none", chunk_rows=chunk_rows)
        found.append((loss, *torch.autograd.grad(loss.sum(), x)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-7, atol=0.0)


@pytest.mark.slow
def test_reduction_none_keeps_nothing_across_micro_batches(losses: Any) -> None:
    """Liger #533: gradients of the head held for every micro-batch in flight."""
    p = losses.make(rows=16, hidden=32, vocabulary=512)
    x, w = p.x.requires_grad_(), p.w.requires_grad_()
    inputs = {t.untyped_storage().data_ptr() for t in (x, w)}
    kept: dict[str, int] = {}
    for reduction in ("mean", "none"):
        storages: dict[int, int] = {}

        def pack(tensor: Tensor, seen: dict[int, int] = storages) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in inputs:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            losses_in_flight = [linear_cross_entropy(x, w, p.target, reduction=reduction) for _ in range(2)]
        kept[reduction] = sum(storages.values())
        del losses_in_flight
        gc.collect()
    assert kept["mean"] == 2 * (x.nbytes + w.nbytes) + 2 * 4
    assert kept["none"] < 1024


def test_in_place_change_between_forward_and_backward_is_noticed(losses: Any) -> None:
    """Liger #272, #273, #343 and others: autograd's own check must keep working."""
    p = losses.make()
    x = p.x.requires_grad_()
    loss = linear_cross_entropy(x, p.w, p.target, reduction="none").sum()
    p.w.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
