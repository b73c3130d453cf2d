"""Run by test_interpreter.py, with TRITON_INTERPRET=1: kernels of the loss with one thing wrong must be caught."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import memwall.triton_kernels._softmax_loss_kernel as kernel_module
from memwall.triton_kernels import softmax_cross_entropy

SOURCE = Path(kernel_module.__file__)


def check(operation: Any) -> None:
    torch.manual_seed(0)
    target = torch.tensor([4400, -100, 17])

    def plain(logits: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        z = 2.0 * torch.tanh(logits.to(wide) * 1.5 / 2.0)
        rows = F.cross_entropy(z, target, reduction="none", label_smoothing=0.3)
        return rows + torch.where(target == -100, 0.0, 0.05 * torch.logsumexp(z, 1) ** 2)

    def ours(logits: Tensor) -> Tensor:
        how: Any = {"label_smoothing": 0.3, "z_loss": 0.05, "softcap": 2.0, "logit_scale": 1.5, "reduction": "none"}
        return softmax_cross_entropy(logits, target, **how)

    operation(ours, plain).check(torch.randn(3, 4500))


def test_the_kernels_as_they_are_pass(operation: Any, poisoned: None) -> None:
    check(operation)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p - (1.0 - label_smoothing)", "p + (1.0 - label_smoothing)"),
        ("gradient -= share", "gradient += share"),
        ("log_sum - plain_sum", "log_sum + plain_sum"),
        ("growth = 2.0", "growth = -2.0"),
        ("+ z_loss * lse * lse", "- z_loss * lse * lse"),
        ("gradient *= 1.0 - ratio * ratio", "gradient *= 1.0 + ratio * ratio"),
        ("running_sum * tl.exp2((running_max - shift)", "running_sum * tl.exp2((shift - running_max)"),
        ("upstream, float", "1.0, float"),
        ("zeros = tl.zeros([BLOCK], tl.float32)", "zeros = tl.zeros([BLOCK], tl.float32) + 1.0"),
    ],
)
def test_a_kernel_with_one_thing_wrong_fails(
    operation: Any, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    wrong = mutant(SOURCE, old, new, parts=["_row_softmax"])
    for name in ("launch_softmax_loss", "launch_softmax_gradient"):
        monkeypatch.setattr(kernel_module, name, getattr(wrong, name))
    with pytest.raises(AssertionError):
        check(operation)


def test_a_kernel_that_writes_its_input_is_caught(mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = mutant(SOURCE, "results = result_ptr + (start", "results = logits_ptr + (start")
    leaf, target = torch.randn(2, 40, requires_grad=True), torch.tensor([3, 4])
    before = leaf.detach().clone()
    torch.autograd.grad(softmax_cross_entropy(leaf, target), leaf)
    assert torch.equal(leaf, before)
    monkeypatch.setattr(kernel_module, "launch_softmax_gradient", wrong.launch_softmax_gradient)
    torch.autograd.grad(softmax_cross_entropy(leaf, target), leaf)
    assert not torch.equal(leaf, before)
