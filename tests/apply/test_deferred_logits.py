"""Logits that are not there yet: a loss takes their factors, everybody else gets them as they always were."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.apply.deferred_logits import DeferredLogits, LossCounts, Product
from memwall.trace.recorder import StepRecorder

V, H = 23, 8


def factors(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and target of two samples with six tokens, one of them ignored."""
    torch.manual_seed(0)
    target = torch.randint(V, (2, 6))
    target[0, 2] = -100
    hidden, weight, bias = torch.randn(2, 6, H), torch.randn(V, H), torch.randn(V)
    return *(value.to(dtype).requires_grad_() for value in (hidden, weight, bias)), target


def deferred(hidden: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype | None = None) -> DeferredLogits:
    return DeferredLogits.of(Product(hidden, weight, bias, dtype or hidden.dtype, 4, LossCounts()))


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().float().view(-1, V), target[..., 1:].reshape(-1))


def padded(logits: Tensor, target: Tensor) -> Tensor:
    """As transformers does: labels are shifted, logits are not."""
    labels = F.pad(target, (0, 1), value=-100)[..., 1:]
    loss = F.cross_entropy(logits.float().view(-1, V), labels.reshape(-1), ignore_index=-100, reduction="sum")
    return loss / (labels != -100).sum()


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(input=logits.reshape(12, -1), target=target.view(-1), label_smoothing=0.1)


def row_by_row(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[1:].to(torch.float32).view((6, V)), target[1], reduction="none").square().sum()


@pytest.mark.parametrize("loss_of", [shifted, padded, smoothed, row_by_row])
def test_a_loss_and_its_gradients_are_those_of_the_logits(loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    *inputs, target = factors()
    expected = loss_of(F.linear(*inputs), target)
    logits = deferred(*inputs)
    found = loss_of(logits, target)
    assert logits.product.counts.num_losses == 1
    assert not logits.product.counts.asked_by
    for ours, own in zip(
        (found, *torch.autograd.grad(found, inputs)),
        (expected, *torch.autograd.grad(expected, inputs)),
        strict=True,
    ):
        torch.testing.assert_close(ours, own)  # by float32's own tolerance


def test_the_loss_makes_no_tensor_of_all_rows_by_all_columns() -> None:
    *inputs, target = factors()
    recorder = StepRecorder([])
    recorder.start()
    shifted(deferred(*inputs), target).backward()
    log = recorder.finish(None)
    # Ten of the twelve rows are in the loss, four at a time.
    assert V * H * 4 in log.storage_bytes
    assert max(log.storage_bytes) < 10 * V * 4


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda logits: logits / 2.0, "div"),
        (lambda logits: logits.argmax(-1), "argmax"),
        (lambda logits: logits.detach(), "detach"),
        (lambda logits: torch.softmax(logits, -1), "softmax"),
        (lambda logits: logits[..., :3], "__getitem__"),
        (lambda logits: logits[:, 0], "__getitem__"),
        (lambda logits: logits.view(2, -1), "view"),
        (lambda logits: logits.transpose(1, 2), "transpose"),
        (lambda logits: logits.to(dtype=torch.float64, copy=True), "to"),
        (lambda logits: logits.contiguous(memory_format=torch.contiguous_format), "contiguous"),
        (lambda logits: F.cross_entropy(logits.view(-1, V), torch.full((12, V), 1.0 / V)), "cross_entropy"),
        (lambda logits: F.cross_entropy(logits.view(-1, V), torch.zeros(12).long(), torch.ones(V)), "cross_entropy"),
        (lambda logits: torch.cat([logits, logits]), "cat"),
    ],
)
def test_whoever_needs_the_logits_gets_them(ask: Callable[[Tensor], Tensor], name: str) -> None:
    *inputs, _ = factors()
    logits = deferred(*inputs)
    found, expected = ask(logits), ask(F.linear(*inputs))
    assert type(found) is Tensor
    assert torch.equal(found, expected)
    assert found.requires_grad == expected.requires_grad
    assert name in logits.product.counts.asked_by
    assert logits.product.counts.num_losses == 0


def test_what_describes_them_computes_nothing() -> None:
    *inputs, _ = factors(torch.bfloat16)
    logits, own = deferred(*inputs), F.linear(*inputs)
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.dtype, logits.device, logits.dim()) == (own.shape, own.dtype, own.device, 3)
    assert logits.size(-1) == V
    assert logits.requires_grad
    assert logits.float().dtype is torch.float32
    assert logits.reshape(-1, V).shape == (12, V)
    with torch.no_grad():
        assert not deferred(*inputs).requires_grad
    assert not logits.product.counts.asked_by


def test_a_product_keeps_the_precision_of_the_call_that_deferred_it() -> None:
    """GIVEN a head under autocast and a loss outside it THEN both factors are multiplied in autocast's precision."""
    *inputs, target = factors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        own = F.linear(*inputs)
    logits = deferred(*inputs, dtype=torch.bfloat16)
    torch.testing.assert_close(shifted(logits, target), shifted(own, target), rtol=1e-2, atol=0.0)
    assert torch.equal(logits + 0.0, own)
    assert logits.dtype is torch.bfloat16


def test_copies_and_files_hold_the_logits_themselves() -> None:
    *inputs, _ = factors()
    with torch.no_grad():
        logits, own = deferred(*inputs), F.linear(*inputs)
        for other in (pickle.loads(pickle.dumps(logits)), copy.deepcopy(logits)):
            assert type(other) is Tensor
            assert torch.equal(other, own)
