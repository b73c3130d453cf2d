"""A session hands over the figures of each training step, while the run goes on."""

import pytest
import torch
from torch import nn

import memwall
from memwall.session.measurements import Measurements
from memwall.session.watch.step_metrics import StepLog, StepMetrics

MIB = 1 << 20


@pytest.mark.parametrize("num_optimizers", [1, 2])
def test_each_step_is_handed_over_once_with_its_seconds(num_optimizers: int) -> None:
    """GIVEN one optimizer, or two that both step WHEN four steps run THEN each is there once, and counts are theirs."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model[:num_optimizers]]
    found: list[StepMetrics] = []
    seen_in_step: list[int] = []
    with memwall.fit(model, optimizers, budget="64GiB") as session:
        session.on_step = found.append
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
            seen_in_step.append(len(found))
    assert [one.step for one in found] == [1, 2, 3, 4]
    assert seen_in_step[-1] == 3  # the last one's seconds are known when nothing can make it longer
    assert [one.is_planned for one in found] == [False, True, True, True]
    assert found[0].step_seconds is None
    assert [one.step_seconds for one in found[1:]] == session.measured.step_seconds
    assert all(one.peak_bytes > 100 * MIB and one.budget_bytes == 64 << 30 for one in found)
    assert session.plan is not None
    forecasts = [one.forecast_bytes for one in found]
    assert forecasts == [None, *[session.plan.forecast.steady_process_bytes] * 3]
    assert max(one.peak_bytes for one in found[1:]) == session.measured.peak_bytes
    assert found[0].forecast_by_category == {}
    assert all(one.forecast_by_category["parameter"] == 2 * 4 * 72 for one in found[1:])


def test_a_step_s_bytes_are_those_moved_since_it_began() -> None:
    """GIVEN bytes that move between steps too WHEN steps end THEN each has its own alone, and the highest peak."""
    moved = [(0, 0)]
    measured = Measurements()
    log = StepLog(measured, lambda: moved[0])
    found: list[StepMetrics] = []
    log.on_step = found.append
    for step, (begun, ended) in enumerate([((0, 0), (5, 1)), ((7, 7), (17, 9))], start=1):
        measured.num_steps = step
        moved[0] = begun
        log.begin_step()
        moved[0] = ended
        for is_first, peak_bytes in [(True, 30), (False, 20)]:
            log.end_step(peak_bytes, None, None, is_first=is_first, is_planned=True, budget_bytes=9)
        log.note_seconds(0.5 * step)
    assert [(one.bytes_to_tier, one.bytes_from_tier) for one in found] == [(5, 1), (10, 2)]
    assert [(one.peak_bytes, one.step_seconds) for one in found] == [(30, 0.5), (30, 1.0)]


def test_the_step_in_which_a_run_ends_is_handed_over_without_seconds() -> None:
    found: list[StepMetrics] = []
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def training() -> None:
        with memwall.fit(model, optimizer, budget="64GiB") as session:
            session.on_step = found.append
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
            raise ValueError("the script's own")

    with pytest.raises(ValueError, match="the script's own"):
        training()
    assert [(one.step, one.step_seconds is None) for one in found] == [(1, True), (2, False), (3, True)]
