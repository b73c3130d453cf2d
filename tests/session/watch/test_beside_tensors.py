"""A process that comes to hold more beside its tensors has that planned with before a step passes the budget."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memwall
from memwall.machine.meter import process_bytes, return_free_memory
from memwall.session.watch.beside_tensors import BesideTensors

MIB = 1 << 20


def plan_for(budget_bytes: int, foreseen_bytes: int) -> Any:
    return SimpleNamespace(
        forecast=SimpleNamespace(budget_bytes=budget_bytes, steady_process_bytes=foreseen_bytes, margin_bytes=16 * MIB)
    )


def found(others: list[int], *, foreseen: int = 484, changes: tuple[int, ...] = ()) -> list[int]:
    """The MiB that are found as steps begin which hold so many beside tensors, under a budget of 500."""
    allocator: Any = SimpleNamespace(is_limited=True, others_bytes=0)
    beside, plan, result = BesideTensors(allocator), plan_for(500 * MIB, foreseen * MIB), []
    for number, held in enumerate(others):
        allocator.others_bytes = held * MIB
        result.append(beside.begin_step(plan, sum(number >= change for change in changes)) // MIB)
    return result


def test_what_rises_is_found_once_half_of_the_margin_is_left() -> None:
    assert found([100, 104, 107, 109, 110, 118]) == [0, 0, 0, 9, 0, 9]


def test_where_a_step_is_far_from_the_budget_more_may_rise() -> None:
    assert found([100, 110, 131, 133], foreseen=460) == [0, 0, 0, 33]


def test_what_another_plan_has_found_is_no_rise() -> None:
    assert found([100, 104, 120, 124], changes=(2,)) == [0, 0, 0, 0]


def test_nothing_is_found_without_a_limit() -> None:
    allocator: Any = SimpleNamespace(is_limited=False, others_bytes=0)
    assert BesideTensors(allocator).begin_step(plan_for(500 * MIB, 484 * MIB), 0) == 0
    assert BesideTensors(allocator).begin_step(None, 0) == 0


@pytest.mark.slow
def test_observations_that_a_loop_keeps_are_planned_with(caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a budget that the plan fills WHEN steps keep arrays THEN a new plan comes before that is passed."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(20)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return_free_memory()
    budget, kept = process_bytes() + 150 * MIB, []
    with memwall.fit(model, optimizer, budget=budget) as session:
        for step in range(90):  # what other tests have left free is room for some of them
            loss = model(torch.ones(1024, 256)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step > 2:
                kept.append(np.ones(2 * MIB, dtype=np.uint8))
            if session.measured.num_replans:
                break
    assert "more beside tensors; a new plan makes up for it from now on" in caplog.text
    assert session.measured.num_replans == 1
    assert kept
    assert max(session.measured.peak_bytes, session.measured.replaced_peak_bytes) <= budget
