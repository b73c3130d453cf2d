"""Small workloads, and ways to record them."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import trained_parameters

from memwall.trace.optimizers import Optimizers
from memwall.trace.records import Step, Trace
from memwall.trace.trace_builder import TraceBuilder
from memwall.trace.workload import Workload


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _workload_of(
    forward: Callable[[nn.Module, Tensor], Tensor], optimizer: Callable[[Any], torch.optim.Optimizer] = _sgd
) -> Workload:
    """A small linear layer, and a loss that does what a test is about."""
    return Workload(model=lambda: nn.Linear(8, 8), batch=lambda: torch.ones(4, 8), loss=forward, optimizer=optimizer)


def _names_of(trace: Trace, step: Step) -> list[str]:
    return [trace.names[op.name] for op in step.ops]


def _record_steps(
    model: nn.Module, steps: Sequence[Callable[[], object]], optimizer: Optimizers = None
) -> tuple[Trace, list[Step]]:
    """Each callable as one recorded step."""
    builder = TraceBuilder([model])
    found = []
    for step in steps:
        builder.start_step(optimizer)
        try:
            step()
            found.append(builder.finish_step(optimizer))
        finally:
            builder.cancel_step()
    return builder.trace(optimizer), found


def _record_one(
    model: nn.Module, forward: Callable[[], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> tuple[Trace, Step]:
    """One step of `forward`, backward, an SGD step and dropped gradients."""
    optimizer = optimizer or torch.optim.SGD(trained_parameters(model), lr=0.1)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    trace, steps = _record_steps(model, [step], optimizer)
    return trace, steps[0]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(x)))


@pytest.fixture(scope="session")
def sgd() -> Callable[[Any], torch.optim.Optimizer]:
    """The plainest optimizer, of parameters."""
    return _sgd


@pytest.fixture(scope="session")
def workload_of() -> Callable[..., Workload]:
    """(loss(model, batch), optimizer) -> a small linear layer, and a loss that does what a test is about."""
    return _workload_of


@pytest.fixture(scope="session")
def names_of() -> Callable[[Trace, Step], list[str]]:
    """The operations of a step, by name."""
    return _names_of


@pytest.fixture(scope="session")
def record_steps() -> Callable[..., tuple[Trace, list[Step]]]:
    """(model, callables, optimizer) -> each callable as one recorded step."""
    return _record_steps


@pytest.fixture(scope="session")
def record_one() -> Callable[..., tuple[Trace, Step]]:
    """(model, forward, optimizer) -> one step of `forward`, backward, the optimizer's step and dropped gradients."""
    return _record_one


@pytest.fixture(scope="session")
def mlp() -> type[nn.Module]:
    """The class of a small model: up, sine, down."""
    return Mlp
