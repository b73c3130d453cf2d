"""Parts of a batch prove, before a step uses them, that they have the gradient of the whole."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memwall.apply.applied import AppliedPlan
from memwall.apply.microbatch import MicroBatches
from memwall.errors import NotExactError
from memwall.session.parts_proof import PartsProof


def proven(model: nn.Module, loss_of: Callable[[Tensor], Tensor], *, micro_batch: int = 4) -> tuple[str, int]:
    """What a proof says of a batch of 8 that is taken in parts, and how often the model was called for it."""
    applied = object.__new__(AppliedPlan)
    applied.model, applied.micro = model, MicroBatches()
    applied.micro.divide_into(micro_batch)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    proof = PartsProof()
    before = torch.get_rng_state()
    for _ in range(2):
        proof.before_step(applied, torch.arange(24.0).reshape(8, 3), loss_of, None)
    assert torch.equal(before, torch.get_rng_state())
    return proof.unproven, len(calls)


def net(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), *more, nn.Linear(5, 2))


def test_a_mean_over_samples_is_proven_once() -> None:
    model = net()
    assert proven(model, lambda rows: model(rows).square().mean()) == ("", 3)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["a sum", "a loss between samples"])
def test_a_loss_that_is_no_mean_ends_the_run_before_a_gradient_is_used(name: str) -> None:
    model = net()
    losses = {
        "a sum": lambda rows: model(rows).square().sum(),
        "a loss between samples": lambda rows: torch.pdist(model(rows)).exp().mean(),
    }
    with pytest.raises(NotExactError, match=r"the gradient of 4 samples is not that of its halves together"):
        proven(model, losses[name])
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("said", "more", "micro_batch"),
    [
        ("its forward draws random numbers, other ones in each part", nn.Dropout(0.5), 4),
        ("the parts are of one sample, and more do not fit", nn.Identity(), 1),
    ],
)
def test_what_cannot_be_compared_is_said(said: str, more: nn.Module, micro_batch: int) -> None:
    model = net(more)
    assert proven(model, lambda rows: model(rows).square().mean(), micro_batch=micro_batch)[0] == said


def test_gradients_that_are_there_already_are_left_alone() -> None:
    model = net()
    model(torch.ones(1, 3)).sum().backward()
    kept = [parameter.grad.clone() for parameter in model.parameters()]
    said, num_calls = proven(model, lambda rows: model(rows).mean())
    assert (said, num_calls) == ("gradients from before the step are there", 0)
    assert all(torch.equal(parameter.grad, one) for parameter, one in zip(model.parameters(), kept, strict=True))
