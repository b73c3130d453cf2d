"""Steps that loss scaling leaves out are no part of the recorded step, and none that a plan is measured by."""

from pathlib import Path

import pytest
import torch
from torch import nn

import memwall
from memwall.integrations.launcher import profile_script

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


def test_another_model_s_scaler_ends_no_step_of_this_one() -> None:
    """GIVEN a loop that steps another model between this one's forward and its step THEN this one is planned."""
    model, other = nn.Linear(8, 1), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (other, model)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in optimizers]
    with memwall.fit(model, optimizers[1], budget=8 * GIB) as session:
        for _ in range(3):
            out = model(torch.randn(4, 8))
            for given, optimizer, scaler in zip((out.detach(), out), optimizers, scalers, strict=True):
                scaler.scale(other(given).mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert session.measured.num_steps == 3
    assert session.plan is not None


SCRIPT = """
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for number in range(4):
    loss = model(torch.randn(4, 8)).mean() * (float("inf") if number == 0 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_profile_has_no_step_that_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    trace = profile_script(str(tmp_path / "train.py"), [], num_steps=2)
    assert len(trace.steps) == 2
    assert trace.num_micro_batches == 1


def test_scaling_is_watched_while_a_session_trains() -> None:
    def methods() -> list[object]:
        return [vars(torch.amp.GradScaler)[name] for name in ("step", "update")]

    before = methods()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = memwall.fit(model, optimizer, budget=8 * GIB)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert methods() == before, "one that never trains has nothing to close"
    model(torch.ones(1, 2)).sum().backward()
    assert not set(methods()) & set(before)
    optimizer.step()
    session.close()
    assert methods() == before
