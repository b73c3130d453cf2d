"""A recorded step tells of its gradients who looks at them, and which have to wait for the optimizer."""

from collections.abc import Callable

import pytest
import torch
from released_models import TiedModel, batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from memwall.trace.records import GradientUse
from memwall.trace.trace_builder import TraceBuilder

Optimizer = torch.optim.Optimizer
Step = Callable[[nn.Module, Optimizer, Tensor], None]


def use_of(step: Step, model: nn.Module | None = None, *, num_before: int = 0) -> GradientUse:
    """Returns what one step shows, after so many others."""
    torch.manual_seed(0)
    model = TiedModel(2) if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    builder = TraceBuilder([model])
    for batch in batches(num_before):
        step(model, optimizer, batch)
    builder.start_step(optimizer)
    step(model, optimizer, batches(num_before + 1)[-1])
    found = builder.finish_step(optimizer).gradient_use
    assert found is not None
    return found


def plain(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_late(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad()
    model(batch).backward()
    optimizer.step()


def zeroed_in_place(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    optimizer.zero_grad(set_to_none=False)
    model(batch).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def logged_after(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    optimizer.step()
    sum(float(p.grad.norm()) for p in model.parameters() if p.grad is not None)
    optimizer.zero_grad()


def averaged(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    next(model.parameters()).detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def rated(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward()
    for group in optimizer.param_groups:
        group["lr"] = float("1e-3")
    optimizer.step()
    optimizer.zero_grad()


def closed(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    def closure() -> Tensor:
        loss: Tensor = model(batch)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    optimizer.zero_grad()


def with_graph(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def kept(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    model(batch).backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("step", [plain, zeroed_late])
def test_a_plain_step_lets_each_gradient_be_used_at_once(step: Step, num_before: int) -> None:
    assert use_of(step, num_before=num_before) == GradientUse(reason="", waiting=())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (zeroed_in_place, "gradients of the last step are added to"),
        (clipped, "looked at between backward and the optimizer's step"),
        (logged_after, "looked at, or zeroed in place, after the optimizer's step"),
        (averaged, "parameters or optimizer state are looked at between"),
        (rated, "'lr' of the optimizer is set between backward and its step"),
        (closed, "backward runs within optimizer.step"),
        (with_graph, "create_graph=True"),
        (kept, "backward keeps its graph"),
    ],
)
def test_what_a_loop_does_with_gradients_is_said(step: Step, reason: str) -> None:
    assert reason in use_of(step, num_before=1).reason


class Uses(nn.Module):
    """A block's bias is added last, a weight is used without a gradient as well, and one in two nested backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(8, 8), nn.Parameter(torch.zeros(8))
        self.scale, self.twice = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x) * self.scale.detach() * self.scale
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)  # type: ignore[assignment]
        return x.tanh() + self.bias


def test_parameters_that_are_still_read_or_get_a_further_term_wait() -> None:
    def step(model: nn.Module, optimizer: Optimizer, _: Tensor) -> None:
        model(torch.ones(2, 8, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = use_of(step, Uses())
    assert not found.reason
    # The block would be computed again when tanh asks for its result, after the bias has its gradient.
    assert dict(found.waiting) == {"bias": 32, "scale": 32, "twice.weight": 256, "twice.bias": 32}


def test_parameters_that_no_optimizer_steps_wait() -> None:
    torch.manual_seed(0)
    model = TiedModel(1)
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    plain(model, optimizer, batches(1)[0])
    found = builder.finish_step(optimizer).gradient_use
    assert found is not None
    assert [name for name, _ in found.waiting] == ["embed.weight"]


def test_sparse_gradients_wait() -> None:
    def step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model = nn.Sequential(nn.Embedding(256, 8, sparse=True), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model])
    builder.start_step(optimizer)
    step(model, optimizer, batches(1)[0])
    found = builder.finish_step(optimizer).gradient_use
    assert found is not None
    assert (found.reason, [name for name, _ in found.waiting]) == ("", ["0.weight"])
