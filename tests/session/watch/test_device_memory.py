"""Beside a CUDA device's tensors, what its segments have free and the host's memory are said when they grow."""

import random

import pytest
import torch

from memwall.machine.device_peaks import segment_bytes
from memwall.session.watch.device_memory import DeviceMemoryWatch

MIB = 1 << 20
ROOM_BYTES = 1 << 40
CUDA = torch.device("cuda", 0)


class Figures:
    """Figures that the allocator and the system give."""

    reserved = allocated = host = mapped = 0
    room = ROOM_BYTES


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> Figures:
    said = Figures()
    module = "memwall.session.watch.device_memory"
    monkeypatch.setattr(f"{module}.segment_bytes", lambda _: (said.reserved, said.allocated))
    monkeypatch.setattr(f"{module}.process_bytes", lambda: said.host)
    monkeypatch.setattr(f"{module}.mapped_bytes", lambda: said.mapped)
    monkeypatch.setattr(f"{module}.free_memory_bytes", lambda: said.room)
    return said


def test_segments_that_grow_away_from_tensors_are_said_once_they_have_for_80_steps(
    figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    watch = DeviceMemoryWatch(CUDA, lambda: ROOM_BYTES)
    for number in range(82):
        figures.reserved, figures.allocated = (1000 + 4 * number) * MIB, 600 * MIB
        watch.begin_step()
    (message,) = caplog.messages
    assert message.startswith("reserved memory grows away from what tensors hold by 4.0 MiB with each step: 1.")
    assert "600.0 MiB allocated as a step begins" in message


def test_segments_that_reach_the_budget_soon_are_said_within_20_steps(
    figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    watch = DeviceMemoryWatch(CUDA, lambda: 2000 * MIB)
    for number in range(20):
        figures.reserved = (1000 + 6 * number) * MIB
        watch.begin_step()
    assert [message[:15] for message in caplog.messages] == ["reserved memory"]


def test_host_memory_that_is_used_up_soon_is_said_within_20_steps(
    figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    watch = DeviceMemoryWatch(CUDA, lambda: 0)
    figures.room = 1000 * MIB
    for _ in range(20):
        figures.host += 6 * MIB
        watch.begin_step()
    assert [message[:11] for message in caplog.messages] == ["host memory"]


def test_host_memory_is_said_once_it_has_risen_for_80_steps_and_pages_of_files_are_not(
    figures: Figures, caplog: pytest.LogCaptureFixture
) -> None:
    watch = DeviceMemoryWatch(CUDA, lambda: ROOM_BYTES)
    for number in range(100):
        figures.host = figures.mapped = 8 * MIB * number
        watch.begin_step()
    assert caplog.messages == []
    for _ in range(82):
        figures.host += 8 * MIB
        watch.begin_step()
    (message,) = caplog.messages
    assert message.startswith("host memory grows by ")
    assert "with each step: tensors that are kept there" in message


def test_nothing_is_said_of_300_healthy_steps(figures: Figures, caplog: pytest.LogCaptureFixture) -> None:
    watch, draw = DeviceMemoryWatch(CUDA, lambda: ROOM_BYTES), random.Random(0)
    for number in range(300):
        figures.allocated = draw.randrange(900 * MIB)
        figures.reserved = 1000 * MIB + 200 * MIB * (number > 100)
        figures.host = int(2000 * MIB * (1 - 0.9**number)) + draw.randrange(16 * MIB)
        watch.begin_step()
    assert caplog.messages == []


@pytest.mark.parametrize("num_steps", [18, 30, 50])
def test_caches_that_fill_are_no_growth(num_steps: int, figures: Figures, caplog: pytest.LogCaptureFixture) -> None:
    """GIVEN a host and segments that grow in each of the first steps, and stay so WHEN it runs THEN nothing is said."""
    watch = DeviceMemoryWatch(CUDA, lambda: ROOM_BYTES)
    for number in range(300):
        figures.host = figures.reserved = 1000 * MIB + 3 * MIB * min(number, num_steps)
        watch.begin_step()
    assert caplog.messages == []


@pytest.mark.gpu
def test_what_segments_hold_is_what_torch_says() -> None:
    kept = torch.ones(1 << 20, device="cuda")
    found = segment_bytes(kept.device)
    assert found == (torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
    assert found[1] >= kept.nbytes
