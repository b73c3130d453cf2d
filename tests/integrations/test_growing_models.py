"""A script that goes on with another model: its first step is one of the run's, recorded, and kept to the budget."""

import json
from pathlib import Path

import pytest

from memwall.cli.app import main

pytestmark = pytest.mark.slow

GROWING = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
for stage in range(3):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(16, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model = nn.Sequential(*list(model)[:-1], nn.Linear(64, 64), model[-1])
"""


def test_each_step_of_a_model_that_grows_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a model that gets layers between steps WHEN it trains on THEN no step of it runs under an older plan."""
    monkeypatch.chdir(tmp_path)
    Path("growing.py").write_text(GROWING)
    assert main(["run", "--budget", "1000MiB", "--report", "run.json", "growing.py"]) == 0
    assert json.loads(Path("run.json").read_text())["measured"]["steps"] == 9
