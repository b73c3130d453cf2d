"""Parts of a batch prove, before a step uses them, that they have the gradient of the whole."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from memwall.apply.applied import AppliedPlan
from memwall.apply.microbatch import MicroBatches
from memwall.apply.technique import Handler
from memwall.apply.techniques.accumulate import AccumulationEffect
from memwall.errors import NotExactError
from memwall.planning.techniques.accumulate import Accumulate
from memwall.session.parts_proof import PartsProof

ROWS = torch.arange(24.0).reshape(8, 3)


def plan_for(model: nn.Module, micro_batch: int = 4) -> AppliedPlan:
    applied = object.__new__(AppliedPlan)
    applied.model, applied.micro = model, MicroBatches()
    applied.micro.divide_into(micro_batch)
    return applied


def proven(model: nn.Module, loss_of: Callable[[Tensor], Tensor], *, micro_batch: int = 4) -> tuple[str, int]:
    """Returns what a proof says of a batch of 8 that is taken in parts, and how often the model was called for it."""
    applied = plan_for(model, micro_batch)
    calls: list[int] = []
    model.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    proof = PartsProof()
    before = torch.get_rng_state()
    for _ in range(2):
        proof.before_step(applied, ROWS, loss_of, None)
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


@pytest.mark.parametrize("kind", ["python", "numpy", "own torch", "own numpy"])
def test_random_numbers_of_any_generator_end_no_run_and_are_put_back(kind: str) -> None:
    model, own, own_numpy = net(), torch.Generator().manual_seed(3), np.random.default_rng(3)
    draw: Callable[[], float] = {
        "python": random.random,
        "numpy": np.random.rand,
        "own torch": lambda: float(torch.rand((), generator=own)),
        "own numpy": own_numpy.random,
    }[kind]
    states = (random.getstate(), np.random.get_state()[1].tolist(), own.get_state().tolist(), own_numpy.__getstate__())
    said, _ = proven(model, lambda rows: model(rows).square().mean() * (0.1 + draw()))
    assert said == "its forward draws random numbers, other ones in each part"
    assert states == (
        *(random.getstate(), np.random.get_state()[1].tolist(), own.get_state().tolist()),
        own_numpy.__getstate__(),
    )


def test_a_forward_that_differs_from_call_to_call_ends_no_run() -> None:
    """As random numbers do whose generator nobody knows: on a device, or in a library."""
    model, calls = net(), iter(range(1, 100))
    said, _ = proven(model, lambda rows: model(rows).square().mean() * next(calls))
    assert said == "the gradient of the same samples is another one each time"


def test_what_is_not_finite_or_zero_is_not_proven() -> None:
    zero = "the gradient of the halves is zero"
    for factor, said in ((float("nan"), "the gradient of a part is not finite"), (0.0, zero)):
        model = net()
        assert proven(model, lambda rows, m=model, f=factor: m(rows).square().mean() * f)[0] == said


def test_rounding_of_gradients_in_half_precision_ends_no_run() -> None:
    model = net().bfloat16()
    said, _ = proven(model, lambda rows: model(rows.bfloat16()).square().sum())
    assert said.startswith("the gradients differ by")
    assert "half precision" in said


def test_a_loss_of_full_parts_alone_ends_no_run() -> None:
    model = net()
    said, _ = proven(model, lambda rows: model(rows).reshape(4, 2).square().mean())
    assert said == "the loss of half a part cannot be computed (RuntimeError)"


def test_parameters_and_buffers_outside_of_the_model_are_put_back() -> None:
    model, head, norm, temperature = net(), nn.Linear(2, 1), nn.BatchNorm1d(2), nn.Parameter(torch.ones(()))
    norm.eval()
    counted = nn.BatchNorm1d(3)
    head.weight.grad = kept = torch.ones_like(head.weight)
    applied = plan_for(model)
    applied.optimizers = (torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1),)
    proof = PartsProof()

    def loss_of(rows: Tensor) -> Tensor:
        counted(rows)
        return (head(norm(model(rows))) * temperature).square().mean()

    proof.before_step(applied, ROWS, loss_of, None)
    assert proof.unproven == ""
    assert head.weight.grad is kept
    assert torch.equal(kept, torch.ones(1, 2))
    assert [p.grad for p in (head.bias, temperature, *model.parameters(), *norm.parameters())] == [None] * 8
    assert int(counted.num_batches_tracked) == 0


def test_attributes_that_a_forward_changes_are_put_back() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count, self.seen = 0, []

        def forward(self, values: Tensor) -> Tensor:
            self.count += 1
            self.seen.append(self.count)
            return values

    counts = Counts()
    model = net(counts)
    proven(model, lambda rows: model(rows).square().mean())
    assert (counts.count, counts.seen) == (0, [])


def test_a_hook_on_a_gradient_outside_of_the_model_is_not_called() -> None:
    model, scale, calls = net(), nn.Parameter(torch.ones(())), list[Tensor]()
    scale.register_post_accumulate_grad_hook(calls.append)
    said, _ = proven(model, lambda rows: (model(rows) * scale).square().mean())
    assert said == "a hook runs when the gradient of a parameter outside of the model is there"
    assert calls == []


def test_sparse_and_complex_gradients_are_compared() -> None:
    model, table, phase = net(), nn.Embedding(8, 3, sparse=True), nn.Parameter(torch.ones(3, dtype=torch.cfloat))

    def loss_of(rows: Tensor) -> Tensor:
        return model((table(rows[:, 0].long() // 3) * phase).abs()).square().mean()

    assert proven(model, loss_of)[0] == ""
    assert table.weight.grad is None


def test_a_batch_that_is_not_divided_or_has_no_terms_leaves_the_proof_open() -> None:
    model, proof = net(), PartsProof()
    applied = plan_for(model)

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        return model(batch["rows"]).square().sum()

    labels = torch.full((8,), -100)
    proof.before_step(applied, {"rows": ROWS[:4], "labels": labels[:4]}, loss_of, None)
    assert not proof.knows(applied)
    labels[[0, 1, 6]] = 1
    proof.before_step(applied, {"rows": ROWS, "labels": labels}, loss_of, None)
    assert not proof.knows(applied)
    assert proof.unproven == "no part so far has loss terms in both of its halves"
    labels[5] = 1  # the second part has them
    with pytest.raises(NotExactError):
        proof.before_step(applied, {"rows": ROWS, "labels": labels}, loss_of, None)


def test_what_was_not_proven_under_one_plan_stays_said_under_the_next() -> None:
    model, proof = net(), PartsProof()
    first, second = plan_for(model), plan_for(model, 2)
    proof.not_asked(first)
    assert proof.unproven == "the loop computes its losses itself"
    proof.before_step(first, ROWS, lambda rows: model(rows).square().mean(), None)
    assert proof.unproven == ""
    proof.not_asked(second)
    proof.before_step(plan_for(model), ROWS, lambda rows: model(rows).square().mean(), None)
    assert proof.unproven == "the loop computes its losses itself"


@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_a_loss_that_is_no_mean_later_on_is_found_at_the_next_proof_unless_gradients_are_noise(
    size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a loss that becomes a sum after the first step WHEN as many steps have begun THEN it is compared again."""
    monkeypatch.setattr("memwall.apply.applied.PROOF_STEPS", 3)
    model, proof = net(), PartsProof()
    applied = plan_for(model)
    for number in range(3):
        applied._num_steps = number
        proof.before_step(applied, ROWS, lambda rows, n=number: model(rows).square().mean() if not n else 1 / 0, None)
    applied._num_steps = 3
    if size < 1:
        proof.before_step(applied, ROWS, lambda rows: size * model(rows).square().sum(), None)
        assert proof.unproven == ""
    else:
        with pytest.raises(NotExactError, match=r"the gradient of 4 samples is not that of its halves together"):
            proof.before_step(applied, ROWS, lambda rows: model(rows).square().sum(), None)


@pytest.mark.parametrize("doubt", ["no terms", "not finite", "zero", "a hook", "not asked"])
def test_what_was_proven_stays_so_where_a_later_proof_says_nothing(doubt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a proof WHEN a later one says nothing THEN the ones after it are made, as large as the first one's."""
    monkeypatch.setattr("memwall.apply.applied.PROOF_STEPS", 3)
    model, proof = net(), PartsProof()
    applied, factor = plan_for(model), {"not finite": math.nan, "zero": 0.0}.get(doubt, 1.0)

    def before_step(number: int, loss_of: Callable[[Tensor], Tensor], label: int = 1) -> None:
        applied._num_steps = number
        batch = {"rows": ROWS, "labels": torch.full((8,), label)}
        proof.before_step(applied, batch, lambda part: loss_of(model(part["rows"])), None)

    before_step(0, lambda found: found.square().mean())
    applied._num_steps = 3
    if doubt == "not asked":
        proof.not_asked(applied)
    hook = model[0].weight.register_post_accumulate_grad_hook(lambda _: None) if doubt == "a hook" else None
    before_step(3, lambda found: found.square().mean() * factor, -100 if doubt == "no terms" else 1)
    if hook is not None:
        hook.remove()
    assert proof.unproven == ""
    before_step(5, lambda found: 1 / 0)
    before_step(6, lambda found: 1e-4 * found.square().sum())  # noise beside the first one
    with pytest.raises(NotExactError):
        before_step(9, lambda found: found.square().sum())


def test_the_actions_of_a_plan_prove_themselves_in_the_step_and_not_in_the_comparison() -> None:
    model, proof, asked = net(), PartsProof(), list[bool]()

    class Acting(Handler[Any]):
        def set_proving(self, target: Any, *, is_proving: bool) -> None:
            asked.append(is_proving)

    applied = plan_for(model)
    applied.handlers, applied._num_steps = (Acting(None),), 1
    effect = AccumulationEffect(Accumulate(micro_batch=4, num_micro_batches=2), model, applied.micro)
    proof.before_step(applied, ROWS, lambda rows: model(rows).square().mean(), None)
    assert asked == [True]
    assert effect.contrary() == ""
    assert not effect.is_seen()


def test_a_part_without_a_loss_term_adds_nothing_to_loss_and_gradient() -> None:
    """GIVEN a mean that is 0/0 in one part THEN loss and gradient of the divided batch are those of the whole."""
    model, labels = net(), torch.tensor([1, 0, 1, 1, -100, -100, -100, -100])

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        counted = batch["labels"] != -100
        return (model(batch["rows"]).square().mean(-1) * counted).sum() / counted.sum()

    whole = loss_of({"rows": ROWS, "labels": labels})
    gradients = torch.autograd.grad(whole, list(model.parameters()))
    micro = MicroBatches()
    micro.divide_into(4)
    shares = [micro.backward(loss_of(part)) for part in micro.split({"rows": ROWS, "labels": labels}, None)]
    torch.testing.assert_close(sum(shares), whole.detach())
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], list(gradients))


def test_norms_are_taken_of_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    norm = torch.linalg.vector_norm

    def watched(tensor: Tensor, **options: Any) -> Tensor:
        sizes.append(tensor.numel())
        return norm(tensor, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", watched)
    model = nn.Sequential(nn.Linear(3, 1024), nn.Linear(1024, 1024))
    assert proven(model, lambda rows: model(rows).square().mean())[0] == ""
    assert max(sizes) <= 1 << 16
