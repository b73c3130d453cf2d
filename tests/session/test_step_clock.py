"""Steps on a CUDA device are measured by its own events, which nobody waits for before another step has ended."""

from typing import Any

import pytest
import torch

from memwall.session.step_clock import StepClock


class Event:
    """Happens at its number, and remembers that somebody has waited for it."""

    waited: list[int] = []  # noqa: RUF012 - of all events
    number = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        Event.number += 1
        self.at = Event.number

    def record(self, stream: Any) -> None:
        """Takes its place on the stream."""

    def synchronize(self) -> None:
        self.waited.append(self.at)

    def elapsed_time(self, end: "Event") -> float:
        return 1000.0 * (end.at - self.at)


def test_a_step_is_read_when_the_next_one_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    Event.waited, Event.number = [], 0
    seconds: list[float] = []
    clock = StepClock(seconds.append)
    clock.begin(torch.device("cuda", 0))  # 1
    clock.end(is_first=True)  # 2
    assert Event.waited == []
    clock.end(is_first=False)  # 3: a second optimizer
    clock.begin(torch.device("cuda", 0))  # 4
    assert Event.waited == []
    clock.end(is_first=True)  # 5
    assert Event.waited == [3]
    assert seconds == [2.0]
    clock.settle()
    assert seconds == [2.0, 1.0]


def test_a_step_under_a_plan_that_is_no_more_is_left_out() -> None:
    seconds: list[float] = []
    clock = StepClock(seconds.append)
    for _ in range(2):
        clock.begin(torch.device("cpu"))
        clock.end(is_first=True)
    clock.forget()
    clock.settle()
    assert len(seconds) == 1


@pytest.mark.gpu
@pytest.mark.phantom(numbers=False, order="timed")
def test_the_time_is_the_devices_not_that_of_launches() -> None:
    x = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    pinned = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    seconds: list[float] = []
    clock = StepClock(seconds.append)
    clock.begin(x.device)
    for _ in range(20):
        x.copy_(pinned, non_blocking=True)
    clock.end(is_first=True)
    clock.settle()
    assert seconds[0] > 20 * (64 << 20) / 200e9  # no link is as fast
