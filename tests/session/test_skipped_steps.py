"""Steps that loss scaling leaves out are no part of the recorded step, and none that a plan is measured by."""

import pytest
import torch
from torch import nn

import memwall

pytestmark = pytest.mark.usefixtures("one_thread")
GIB = 1 << 30


def trained(overflows: int) -> "memwall.Session":
    """Trains four steps, of which the first few overflow, as they do in float16 until the scale is small enough."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with memwall.fit(model, optimizer, budget=8 * GIB) as session:
        for number in range(overflows + 4):
            loss = model(torch.randn(4, 8)).mean() * (float("inf") if number < overflows else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return session


def test_steps_left_out_do_not_join_the_recorded_one() -> None:
    session = trained(overflows=2)
    assert session.trace is not None
    assert session.trace.num_micro_batches == 1
    assert session.measured.num_steps == 4
    assert len(session.measured.step_seconds) == 3


def test_without_any_the_first_step_is_the_recorded_one() -> None:
    session = trained(overflows=0)
    assert session.measured.num_steps == 4
