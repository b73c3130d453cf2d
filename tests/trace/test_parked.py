"""A step whose saved tensors are elsewhere between forward and backward is recorded as the plain one would be."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memwall.trace.saved_tensors import Parking
from memwall.trace.trace_builder import TraceBuilder

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64


class Elsewhere:
    """Keeps a copy of what is saved, as the disk does."""

    def pack(self, tensor: Tensor) -> object:
        return tensor.clone()

    def unpack(self, saved: Any) -> Tensor:
        return saved.clone()


class TakesWhatItSaved(torch.autograd.Function):
    """Has autograd let go of what is saved before it uses it, as compiled code does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.sin())
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (saved,) = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()
        return gradient * saved.exp() * saved


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return TakesWhatItSaved.apply(x @ self.weight).sum()  # type: ignore[no-untyped-call]


def lives(parking: Parking | None) -> list[tuple[str, int]]:
    """When the saved results of `sin` die: the operation before which, and its name."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    builder = TraceBuilder([model], parking)
    builder.start_step(optimizer)
    model(torch.ones(WIDTH, WIDTH)).backward()
    optimizer.step()
    step = builder.finish_step(optimizer)
    trace = builder.trace(optimizer)
    names = [trace.names[op.name] for op in step.ops]
    ends = [s.death for s in step.storages if s.birth >= 0 and names[s.birth] == "aten.sin.default"]
    return [(names[end - 1], end) for end in ends]


def test_what_backward_takes_from_autograd_lives_as_long_as_it_is_used() -> None:
    plain = lives(None)
    assert [name for name, _ in plain] == ["aten.mul.Tensor"]
    assert lives(Elsewhere()) == plain
