"""Operators' own workspaces beside a step on fake tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.predict.curve import live_peak_bytes
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def test_workspaces_of_a_batch_too_large_to_try_are_extrapolated(
    monkeypatch: pytest.MonkeyPatch, sgd: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """GIVEN scratch memory for a part of the batch WHEN a convolution runs THEN its workspace is the live one."""
    workload = Workload(
        model=lambda: nn.Conv2d(8, 8, 3, padding=1),
        batch=lambda: torch.ones(32, 8, 16, 16),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=sgd,
    )
    monkeypatch.setattr("scratch_workspaces._MOST_BYTES", 16 * 8 * 16 * 16 * 4)
    live, fake = record(workload), record_fake(workload, has_cpu_workspaces=True)
    without = record_fake(workload)
    peaks = [live_peak_bytes(trace.steps[1], "cpu") for trace in (live, fake, without)]
    assert peaks[1] == pytest.approx(peaks[0], rel=0.01)
    assert peaks[2] < 0.9 * peaks[0]
