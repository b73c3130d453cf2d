"""That nothing may be written to the disk reaches the planner, whoever asks for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import memwall
from memwall.cli.app import main
from memwall.errors import UsageError
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.search import found_by

pytestmark = pytest.mark.slow

PLAIN = str(Path(__file__).parents[1] / "scripts" / "train_plain.py")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Returns what is asked of each plan that is made."""
    found: list[bool] = []

    def noted(search: RecordingSearch) -> Any:
        found.append(search.settings.no_disk)
        return found_by(search)

    monkeypatch.setattr("memwall.session.first_plan.found_by", noted)
    return found


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_of_fit(asked: list[bool], tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    with memwall.fit(model, optimizer, budget="1TiB", disk=str(tmp_path), no_disk=True) as session:
        trained(model, optimizer)
    assert set(asked) == {True}
    with pytest.raises(UsageError, match="no_disk is for a plan that is made in the run"):
        memwall.fit(model, optimizer, plan=session.plan, no_disk=True)


def test_of_the_command(asked: list[bool], tmp_path: Path) -> None:
    disk = ("--disk", str(tmp_path), "--json")
    assert main(["run", "--budget", "1TiB", *disk, "--no-disk", PLAIN]) in (0, 4)
    assert set(asked) == {True}


@pytest.mark.requires("transformers", "accelerate")
def test_of_a_trainer(asked: list[bool], make_model: Callable[[], Any], samples: Any, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from memwall.integrations.trainer import MemwallCallback

    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to=[], save_strategy="no")
    callback = MemwallCallback(budget="1TiB", no_disk=True)
    Trainer(make_model(), arguments, train_dataset=samples, callbacks=[callback]).train()
    assert set(asked) == {True}


@pytest.mark.requires("transformers", "accelerate")
def test_of_an_accelerator(asked: list[bool]) -> None:
    from accelerate import Accelerator

    from memwall.integrations.accelerate import MemwallPlugin

    model = torch.nn.Linear(8, 8)
    with MemwallPlugin(budget="1TiB", no_disk=True) as plugin:
        trained(*plugin.prepare(Accelerator(cpu=True), model, torch.optim.AdamW(model.parameters())))
    assert set(asked) == {True}
    assert plugin.session is not None
    refused = MemwallPlugin(plan=plugin.session.plan, no_disk=True)
    with pytest.raises(UsageError, match="no_disk is for a plan that is made in the run"):
        refused.prepare(Accelerator(cpu=True), model, torch.optim.AdamW(model.parameters()))
