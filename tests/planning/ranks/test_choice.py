"""The choice among ways to divide a model: none that fits is passed over."""

from functools import cache

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.planning.ranks.search import plan_ranks
from memwall.planning.settings import Settings
from memwall.planning.techniques.accumulate import Accumulate
from memwall.predict.cuda.translate import recording_for, translated
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

pytestmark = pytest.mark.slow

A100 = hardware_named("a100-40gb")
GIB = 1 << 30


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4096, 8192), nn.Linear(8192, 4096)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = values + self.down(torch.relu(self.up(values)))
        return outputs


@cache
def traced(rows: int) -> Trace:
    workload = Workload(
        model=lambda: nn.Sequential(*(Block() for _ in range(4))),
        batch=lambda: torch.ones(rows, 4096),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
    )
    recording = recording_for(A100)
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(trace, A100)


def settings(budget_bytes: int, *, splits: bool = False) -> Settings:
    return Settings(budget_bytes=budget_bytes, hardware=A100, allow_accumulation=splits)


def test_micro_batches_fit_where_recomputing_every_block_does_not() -> None:
    made, _ = plan_ranks(traced(262_144), settings(16 * GIB, splits=True), num_ranks=8, num_ranks_per_node=8, link=None)
    assert made is not None
    assert made.forecast.fits
    assert any(isinstance(action, Accumulate) for action in made.actions)
