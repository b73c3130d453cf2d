"""What a training step changes before its optimizer steps is put back, or a reason is given."""

import hashlib

import pytest
import torch
from torch import Tensor, nn

from memwall.session.step_state import StepState


def digest(model: nn.Module) -> str:
    """SHA-256 over parameters and buffers."""
    found = hashlib.sha256()
    for tensor in (*model.parameters(), *model.buffers()):
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Table(nn.Module):
    """A small buffer that each step changes, and a large one that no step changes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("table", torch.arange(1 << 18, dtype=torch.float32))

    def forward(self, rows: Tensor) -> Tensor:
        return self.norm(rows).sum()


@pytest.fixture
def taken() -> tuple[Table, StepState]:
    """A model after its first step, and what its second one finds."""
    model = Table()
    state = StepState(model)
    state.take()
    model(torch.randn(8, 4)).backward()
    state.drop_constants()
    model.zero_grad()
    state.take()
    return model, state


def test_what_a_step_changes_is_put_back(taken: tuple[Table, StepState]) -> None:
    model, state = taken
    before = digest(model)
    model(torch.randn(8, 4)).backward()
    assert digest(model) != before
    assert state.why_not() is None
    state.restore()
    assert digest(model) == before
    assert model.norm.weight.grad is None


def test_large_buffers_that_stay_as_they_are_take_no_second_room(taken: tuple[Table, StepState]) -> None:
    _, state = taken
    assert sum(copy.tensor.nbytes for copy in state._of_model._copies.values()) < 100


@pytest.mark.parametrize("name", ["table", "norm.bias"])
def test_what_no_step_should_change_is_a_reason(name: str, taken: tuple[Table, StepState]) -> None:
    model, state = taken
    with torch.no_grad():
        (model.table if name == "table" else model.norm.bias).add_(1)
    reasons = {
        "table": "its forward changes table (1.0 MiB), of which there is no copy",
        "norm.bias": "norm.bias was changed before the optimizer stepped",
    }
    assert state.why_not() == reasons[name]


def test_gradients_that_were_there_are_a_reason(taken: tuple[Table, StepState]) -> None:
    model, state = taken
    model.eval()(torch.randn(8, 4)).backward()
    state.take()
    assert state.why_not() == "gradients from before the step were there when it began"
    model.zero_grad(set_to_none=False)
    state.take()
    assert state.why_not() is None
