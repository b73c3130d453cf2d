"""A forward before the training, whose result is dropped without a backward, is no part of the recorded step."""

from pathlib import Path

import pytest
import torch
from torch import nn

import memwall
from memwall.integrations.launcher import run_script
from memwall.session.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1 << 30
BATCH = 16


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def trained(*, num_dropped: int = 0, is_kept: bool = False) -> "memwall.Session":
    """Trains three steps after forwards of another batch, whose results are dropped or part of the first loss."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, budget=8 * GIB) as session:
        for _ in range(num_dropped):
            model(torch.randn(2, 8))
        kept = [model(torch.randn(2, 8))] if is_kept else []
        for _ in range(3):
            loss = model(torch.randn(BATCH, 8)).square().mean() + sum(each.mean() for each in kept)
            kept.clear()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return session


def num_forwards(session: "memwall.Session") -> int:
    assert session.trace is not None
    return sum(call.module == 0 for call in session.trace.steps[0].calls)


@pytest.mark.parametrize("num_dropped", [0, 1, 2])
def test_a_dry_run_is_no_part_of_the_step(num_dropped: int) -> None:
    session = trained(num_dropped=num_dropped)
    assert session.trace is not None
    assert session.trace.micro_batch == BATCH
    assert num_forwards(session) == 1
    assert session.measured.num_steps == 3


def test_a_forward_whose_result_is_in_the_loss_is_one() -> None:
    assert num_forwards(trained(is_kept=True)) == 2


def test_a_loop_that_calls_its_model_for_its_results_alone_is_recorded_with_most_of_these_calls() -> None:
    """GIVEN ten forwards without a backward, as of an actor in a game WHEN it trains THEN few recordings were lost."""
    assert num_forwards(trained(num_dropped=10)) == 10 - 3 + 1


_TRAINING = """
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(3):
    loss = model(torch.randn(16, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
_SCRIPTS = {
    "a model that is called in its constructor": """
import torch
from torch import nn
class Projected(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.projection = nn.Sequential(nn.Linear(8, 32), nn.Tanh()), None
    def forward(self, x):
        x = self.net(x)
        if self.projection is None:
            self.projection = nn.Linear(x.shape[1], 4)
        return self.projection(x)
class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = Projected()
        self.forward(torch.randn(2, 8))
    def forward(self, x):
        return self.student(x)
model = Learner()
""",
    "layers that make their parameters when they are called": """
import torch
from torch import nn
model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Tanh()), nn.LazyLinear(4))
model(torch.randn(2, 8))
""",
    "a dry run before there is an optimizer": """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
print(model(torch.randn(2, 8)).shape)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", _SCRIPTS)
def test_a_script_is_planned_from_its_first_step(name: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPTS[name] + _TRAINING)
    session = Session(budget_bytes=8 * GIB)
    assert run_script(str(tmp_path / "train.py"), [], session) == 0
    assert session.trace is not None
    assert session.trace.micro_batch == BATCH
    assert num_forwards(session) == 1
    assert session.measured.num_steps == 3
