"""The figures of a step reach TensorBoard and W&B by the Trainer's own integrations, and W&B by nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memwall
from memwall.integrations.trainer import MemwallCallback
from memwall.planning.planfile import Plan

pytestmark = pytest.mark.slow

FIGURES = ("peak_bytes", "budget_bytes", "forecast_bytes", "step_seconds")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """W&B without a server, whose runs lie in a folder of the test's."""
    wandb = pytest.importorskip("wandb")
    for name, value in {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield wandb
    wandb.finish()


@pytest.mark.requires("tensorboard")
def test_tensorboard_has_the_figures_of_each_step(
    train: Any, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    trainer = train(MemwallCallback(plan=plan), logging_strategy="steps", logging_steps=1, report_to="tensorboard")
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    for name in FIGURES:
        steps = [one.step for one in events.Scalars(f"train/memwall/{name}")]
        # A step's seconds are known when the next one begins.
        assert steps == list(range(2 if name == "step_seconds" else 1, trainer.state.max_steps + 1))


def test_wandb_has_the_figures_of_the_last_step(train: Any, plan: Plan, offline: Any) -> None:
    seen: dict[str, Any] = {}

    class Reads(MemwallCallback):
        def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
            seen.update(dict(offline.run.summary))
            return super().on_train_end(*args, **kwargs)

    trainer = train(Reads(plan=plan), logging_strategy="steps", logging_steps=1, report_to="wandb")
    last = [one for one in trainer.state.log_history if "memwall/peak_bytes" in one][-1]
    assert {name: seen[f"train/memwall/{name}"] for name in FIGURES} == {
        name: last[f"memwall/{name}"] for name in FIGURES
    }


def test_a_loop_of_ones_own_logs_what_it_is_handed_and_nothing_else(offline: Any) -> None:
    """GIVEN a W&B run of the script's WHEN a session trains THEN the run has what the script logs alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = offline.init(project="memwall")
    with memwall.fit(model, optimizer, budget="20GiB") as session:
        session.on_step = lambda step: run.log({"peak": step.peak_bytes})
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert {name for name in dict(run.summary) if not name.startswith("_")} == {"peak"}
