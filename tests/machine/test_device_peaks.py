"""A CUDA device's peaks, the script's and memwall's, kept apart for several sessions at once."""

from typing import Any

import pytest
import torch

from memwall.machine import device_peaks
from memwall.machine.device_peaks import SeparatePeaks, allocator_peak, reset_allocator_peak

DEVICE = torch.device("cuda", 0)


class Allocator:
    """Stands for torch's statistics of one device."""

    def __init__(self) -> None:
        self.now_bytes = self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        self.now_bytes, self.peak_bytes = num_bytes, max(self.peak_bytes, num_bytes)

    def statistics(self, device: Any = None) -> dict[str, Any]:
        figures = {"all": {"current": self.now_bytes, "peak": self.peak_bytes}}
        names = ("active_bytes", "allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        return dict.fromkeys(names, figures) | {"num_alloc_retries": 0}

    def reset(self, device: Any = None) -> None:
        self.peak_bytes = self.now_bytes


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    found = Allocator()
    for owner in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(owner, "memory_stats_as_nested_dict", found.statistics)
        monkeypatch.setattr(owner, "reset_peak_memory_stats", found.reset)
    return found


def script_peak_bytes() -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(0)["allocated_bytes"]["all"]["peak"])


@pytest.mark.parametrize("is_first_closed", [True, False])
def test_a_session_that_closes_leaves_the_peaks_of_another_apart(allocator: Allocator, is_first_closed: bool) -> None:
    first, second = SeparatePeaks.begin(DEVICE), SeparatePeaks.begin(DEVICE)
    allocator.hold(900)
    allocator.hold(100)
    reset_allocator_peak(DEVICE)
    (first if is_first_closed else second).undo()
    allocator.hold(300)
    assert (script_peak_bytes(), allocator_peak(DEVICE).allocated_bytes) == (900, 300)
    allocator.hold(100)
    reset_allocator_peak(DEVICE)
    assert (script_peak_bytes(), allocator_peak(DEVICE).allocated_bytes) == (900, 100)
    torch.cuda.reset_peak_memory_stats(0)
    assert script_peak_bytes() == 100
    (second if is_first_closed else first).undo()
    assert torch.cuda.reset_peak_memory_stats == allocator.reset
    assert not device_peaks._separate
