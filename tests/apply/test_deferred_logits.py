"""Logits that are not there yet: a loss takes their factors, everybody else gets them as they always were."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.apply.kernels.deferred_logits import DeferredLogits
from memwall.apply.kernels.deferred_product import LossCounts, Product
from memwall.apply.kernels.patched import patch_kernels
from memwall.errors import ApplyError
from memwall.trace.step_recorder import StepRecorder

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


def capped(logits: Tensor, target: Tensor) -> Tensor:
    """As of Gemma 2."""
    return padded(torch.tanh(logits / 1.5) * 1.5, target)


def scaled(logits: Tensor, target: Tensor) -> Tensor:
    """As of Granite and of Cohere, and bounded between."""
    return padded(3 * (0.25 * logits.float() / 8.0).tanh().mul(2.0), target)


@pytest.mark.parametrize("loss_of", [shifted, padded, smoothed, row_by_row, capped, scaled])
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
    num_bytes = [storage.nbytes for storage in log.storages]
    assert V * H * 4 in num_bytes
    assert max(num_bytes) < 10 * V * 4


@pytest.mark.parametrize(
    ("ask", "name"),
    [
        (lambda logits: logits + 2.0, "add"),
        (lambda logits: logits / torch.tensor(2.0), "div"),
        (lambda logits: logits * -2.0, "mul"),
        (lambda logits: logits * True, "mul"),
        (lambda logits: torch.div(logits, 2.0, rounding_mode="floor"), "div"),
        (lambda logits: logits.tanh().tanh(), "tanh"),
        (lambda logits: (logits / 3.0).tanh().mul(3.0).argmax(-1), "argmax"),
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


def set_column(logits: Tensor) -> None:
    logits[..., 3] = -1e4


def set_in_a_view(logits: Tensor) -> None:
    logits.view(-1, V)[:, 3] = -1e4


def set_in_the_data(logits: Tensor) -> None:
    logits.data[..., 3] = -1e4


def fill_by_a_mask(logits: Tensor) -> None:
    logits.masked_fill_(torch.arange(V) > 20, -1e4)


def set_in_rows_without_the_first(logits: Tensor) -> None:
    logits[:, 1:].mul_(2.0)


@pytest.mark.parametrize(
    "write", [set_column, set_in_a_view, set_in_the_data, fill_by_a_mask, set_in_rows_without_the_first]
)
@pytest.mark.parametrize("loss_of", [shifted, padded])
def test_what_is_written_into_them_is_in_the_loss(
    loss_of: Callable[[Tensor, Tensor], Tensor], write: Callable[[Tensor], None]
) -> None:
    """As a model does that pads its vocabulary, or bans a token."""
    *inputs, target = factors()
    results = []
    # What was made of them before is written into as well, where it is a view of them, and not where it is a copy.
    for logits in (deferred(*inputs), F.linear(*inputs)):
        view, copied = logits.view(4, 3, V), logits.to(torch.float64)
        write(logits)
        loss = loss_of(logits, target) + view.square().mean() + copied.square().mean()
        results.append((loss, *torch.autograd.grad(loss, inputs)))
    for ours, own in zip(*results, strict=True):
        assert torch.equal(ours, own)


class OwnLoss(torch.autograd.Function):
    """Cross entropy with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(torch.softmax(logits, -1) - F.one_hot(target, V))
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grads[0] * gradient / len(gradient), None


class OverwritingLoss(OwnLoss):
    """Puts its gradient where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, target)
        logits.copy_(torch.softmax(logits, -1) - F.one_hot(target, V))
        ctx.save_for_backward(logits.detach())
        return loss


def hooked(logits: Tensor, target: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: 2.0 * gradient)
    return F.cross_entropy(logits, target)


class Headed(nn.Module):
    """A layer, and a head that is found by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.lm_head = nn.Linear(H, H), nn.Linear(H, V)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.body(x))
        return logits


@pytest.mark.parametrize(
    "loss_of",
    [
        OwnLoss.apply,
        OverwritingLoss.apply,
        hooked,
        lambda logits, target: checkpoint(F.cross_entropy, logits, target, use_reentrant=True),
        lambda logits, target: F.cross_entropy(logits, target) + logits.logsumexp(-1).square().mean(),
    ],
    ids=["own-backward", "overwriting", "hooked", "checkpointed", "two-terms"],
)
@pytest.mark.parametrize("has_hook", [False, True], ids=["plain", "head-with-backward-hook"])
def test_a_gradient_for_them_goes_on_to_what_is_before_the_head(loss_of: Any, has_hook: bool) -> None:
    *_, target = factors()
    target = target.clamp(min=0).reshape(-1)
    torch.manual_seed(0)
    model, x = Headed(), torch.randn(12, H)
    if has_hook:
        model.lm_head.register_full_backward_hook(lambda module, came, went: None)
    loss_of(model(x), target).backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert patch_kernels(model, chunk_rows=4).num_replaced == 1
    loss_of(model(x), target).backward()
    for parameter, own in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, own)


@pytest.mark.parametrize(
    "ask",
    [
        lambda logits: logits.argmax(-1),
        lambda logits: logits.float(),
        lambda logits: F.cross_entropy(logits.view(-1, V), torch.zeros(12).long()),
    ],
)
def test_logits_of_a_weight_that_is_no_longer_what_it_was_are_refused(ask: Callable[[Tensor], Tensor]) -> None:
    """As of a loop that counts right answers after its optimizer's step."""
    *inputs, _ = factors()
    logits = deferred(*inputs)
    with torch.no_grad():
        inputs[1].add_(1.0)
    with pytest.raises(ApplyError, match=r"the weight of the head changed since its forward; use logits before"):
        ask(logits)


def test_what_was_asked_for_before_stays() -> None:
    *inputs, _ = factors()
    logits, expected = deferred(*inputs), F.linear(*inputs).argmax(-1)
    assert torch.equal(logits.argmax(-1), expected)
    with torch.no_grad():
        inputs[1].add_(1.0)
    assert torch.equal(logits.argmax(-1), expected)


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
