"""Batches that the loop hands over, and a plan divides: the gradient of the whole, from the first step under it on."""

from pathlib import Path

import pytest
import torch
from plans import plan_of
from torch import nn
from warm_python import printed_by

from memwall.errors import ApplyError
from memwall.planning.techniques.accumulate import Accumulate
from memwall.session.session import Session


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5])
def test_accumulation_gives_the_gradient_of_the_undivided_batch(micro_batch: int) -> None:
    """GIVEN ragged labels in float64 WHEN the batch is split THEN the gradient is the undivided batch's to 1e-12."""
    torch.manual_seed(0)
    model = nn.Embedding(11, 7, dtype=torch.float64)
    ids = torch.randint(0, 11, (5, 6))
    labels = torch.randint(0, 7, (5, 6))
    labels[0, 2:] = -100
    labels[3, 1:] = -100
    batch = {"input_ids": ids, "labels": labels}

    def loss(part: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(part["input_ids"])[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), part["labels"][:, 1:].flatten())

    loss(batch).backward()
    expected = model.weight.grad
    model.weight.grad = None
    plan = plan_of(model, Accumulate(micro_batch=micro_batch, num_micro_batches=-(-5 // micro_batch)))
    with Session(plan=plan) as session:
        session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        session._live.in_effect.micro.micro_batch = micro_batch
        num_parts = 0
        for micro in session.step(batch):
            session.backward(loss(micro))
            num_parts += 1
    assert num_parts == -(-5 // micro_batch)
    torch.testing.assert_close(model.weight.grad, expected, rtol=1e-12, atol=1e-15)


DIVIDED = """
import json, sys
import memwall, msgspec, torch
from memwall.session import live_plan
from torch import nn
from memwall.planning.technique import techniques, unregister
for other in {technique.tag for technique in techniques()} & {"recompute", "offload"}:
    unregister(other)  # it reaches the same budget, and is chosen where it happens to be measured as the faster way
# The recorded step is not divided, and is not what this is about.
live_plan.with_loaders = lambda first, trace: msgspec.structs.replace(first, needed_bytes=0)
sizes = []
def train(budget, num_steps):
    layers = [nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)) for _ in range(3)]
    model = nn.Sequential(*layers)
    model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget=budget, disk=sys.argv[1]) as session:
        for _ in range(num_steps):
            session.compute_gradients(torch.ones(1024, 64), lambda rows: model(rows).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(0)
    return session
forecast = train("1TiB", 1).plan.forecast
sizes.clear()
session = train(forecast.smallest_feasible_budget_bytes + (6 << 20), 3)
print(json.dumps([[type(action).__name__ for action in session.plan.actions], sizes]))
"""


@pytest.mark.slow
def test_the_first_step_under_a_plan_is_divided_already(tmp_path: Path) -> None:
    """GIVEN a budget that only smaller parts of the batch meet WHEN a plan divides it THEN from its first step on."""
    # A process of its own: what other tests have left in this one may go while the budget is chosen.
    actions, sizes = printed_by(DIVIDED, tmp_path)
    assert Accumulate.__name__ in actions
    first, second, *_ = [list(map(int, step.split())) for step in " ".join(map(str, sizes)).split(" 0")]
    assert first == [1024]
    assert max(second) < 1024 <= sum(second)


def test_backward_outside_a_step_is_refused() -> None:
    """GIVEN no micro-batch WHEN session.backward is called THEN the error names the loop to write."""
    model = nn.Linear(2, 2)
    plan = plan_of(model)
    with Session(plan=plan) as session, pytest.raises(ApplyError, match=r"for micro in session.step\(batch\)"):
        session.backward(model(torch.zeros(1, 2)).sum())
