"""The host's memory is bounded before the kernel bounds it: pinned memory, and a budget that is more than there is."""

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import memwall
from memwall.apply import parking
from memwall.predict.limits import memory_limit_bytes
from memwall.units import format_bytes


class OnCuda:
    """Stands in for a model on a CUDA device, of which there is none here."""

    def parameters(self) -> Iterator[Any]:
        yield SimpleNamespace(device=torch.device("cuda"), untyped_storage=torch.ones(1).untyped_storage)

    def buffers(self) -> Iterator[Tensor]:
        return iter(())


def test_pinned_memory_leaves_a_tenth_of_what_the_host_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "free_memory_bytes", lambda: 1000)
    engine, close = parking.open_engine([OnCuda()], disk=None, capacity_bytes=None, window_bytes=1, min_bytes=1)  # type: ignore[list-item]
    close()
    assert engine._host_limit_bytes == 900


def test_a_budget_above_the_limit_in_force_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN more than the machine has WHEN the plan is made THEN it says so, with the limit."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget=memory_limit_bytes() * 2, disk=str(tmp_path)) as session:
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        session.end_step()
    found = (
        f"the budget of {format_bytes(memory_limit_bytes() * 2)} is more than the {format_bytes(memory_limit_bytes())}"
    )
    assert found in caplog.text
    assert [record.levelno for record in caplog.records if found in record.getMessage()] == [logging.WARNING]
