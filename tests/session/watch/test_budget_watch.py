"""That a budget is passed is said when it happens, once for each part of a run."""

import logging
from pathlib import Path

import pytest
import torch
from plans import plan_of
from torch import nn

import memwall
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.parameters import ParameterPlacement
from memwall.session import measurements
from memwall.session.measurements import Measurements
from memwall.session.session import Session
from memwall.session.watch.budget_watch import BudgetWatch

MIB = 1 << 20


class Meter:
    """Shows what it is told."""

    device = "cpu"
    shown = 100 * MIB

    def peak_bytes(self) -> int:
        return self.shown


@pytest.fixture
def meter() -> Meter:
    return Meter()


def watch_on(meter: Meter, place: list[str], *, is_told_later: bool = False) -> BudgetWatch:
    return BudgetWatch(Measurements(meter=meter), lambda: (place[0], is_told_later))  # type: ignore[arg-type]


def test_the_budget_s_passing_is_said_once_in_each_part(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    place = ["a training step"]
    watch = watch_on(meter, place)
    watch.start(120 * MIB)
    watch.look()
    assert not caplog.messages
    meter.shown = 130 * MIB
    for where in ("a training step", "a training step", "an evaluation"):
        place[0] = where
        watch.look()
    watch.close()
    assert caplog.messages == [
        f"the budget of 120.0 MiB is passed in {where}: the process has held 130.0 MiB, 10.0 MiB more"
        for where in ("a training step", "an evaluation")
    ]


def test_it_is_said_by_itself_while_nobody_looks(meter: Meter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    watch = watch_on(meter, ["an evaluation"])
    meter.shown = 130 * MIB
    watch.start(120 * MIB)
    for _ in range(50):
        if caplog.messages or watch._ended.wait(0.05):
            break
    watch.close()
    assert len(caplog.messages) == 1


def test_a_first_step_is_given_time_to_end_and_have_its_plan_say_it(
    meter: Meter, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watch_on(meter, ["the first step"], is_told_later=True)
    meter.shown = 130 * MIB
    watch.start(120 * MIB)
    watch.look()
    watch.close()
    assert not caplog.messages


def test_before_the_first_step_of_a_device_the_host_s_bytes_are_not_held_against_its_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter = Meter()
    meter.device = "cuda"
    monkeypatch.setattr(measurements, "meter_of", lambda model: meter)
    model = nn.Linear(2, 2)
    session = memwall.fit(model, torch.optim.SGD(model.parameters(), lr=0.1), budget=MIB)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert session._steps._watch._thread is None
    session.close(completed=False)


def test_what_the_system_can_take_back_is_in_the_warning_as_little_as_in_the_verdict(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN parameters on disk WHEN a state dict is read THEN the pages of files that show them pass no budget."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    window = {"tier": "disk", "min_bytes": 1024}
    placed = (
        ParameterPlacement(blocks=("0", "1", "2", "3"), window_bytes=4 * MIB, written_bytes=0, **window),  # type: ignore[arg-type]
        OptimizerPlacement(resident_bytes=0, bucket_bytes=4 * MIB, **window),  # type: ignore[arg-type]
    )
    with Session(plan=plan_of(model, *placed), disk=str(tmp_path)) as session:
        session.attach(model, optimizer)
        for _ in range(2):
            model(torch.ones(2, 1024)).sum().backward()
            optimizer.step()
        saved, measured = model.state_dict(), session.measured
        measured.meter.reset_peak()
        budget_bytes = measured.meter.peak_bytes() + 6 * MIB
        assert torch.stack([value.sum() for value in saved.values()]).isfinite().all()
        assert measured.meter.peak_bytes() > budget_bytes
        watch = BudgetWatch(measured, lambda: ("saving", False))
        watch.start(budget_bytes)
        watch.look()
        measured.overall_peak_bytes = 0
        model(torch.ones(2, 1024))  # begins a step
        watch.close()
        assert measured.overall_peak_bytes <= budget_bytes
    assert not [message for message in caplog.messages if "is passed" in message]
