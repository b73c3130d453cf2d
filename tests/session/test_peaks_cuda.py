"""Peaks of a CUDA device: those that a script reads are its own, and the report has what torch counts."""

import pytest
import torch
from torch import nn

import memwall
from memwall.observe.measure import run_report
from memwall.patches import active
from memwall.report.run_grids import run_grid

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def test_a_script_that_asks_for_its_peak_hears_that_of_the_whole_run() -> None:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    peaks = []
    with memwall.fit(model, optimizer, budget="4GiB") as session:
        for num_rows in (16_384, 16_384, 1024, 1024):
            model(torch.randn(num_rows, 256, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            peaks.append((torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["allocated_bytes.all.peak"]))
        report = run_report(session)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()
    # The last steps are small ones.
    assert peaks == sorted(peaks)
    assert peaks[0][0] == peaks[0][1] < peaks[1][0] == peaks[-1][0] == peaks[-1][1]
    assert not [entry for entry in active() if "peaks" in entry.why]
    measured = report.measured
    assert 16 * MIB < measured.peak.allocated_bytes <= min(peaks[-1][0], measured.peak.reserved_bytes or 0)
    assert (measured.num_alloc_retries, measured.inactive_bytes is not None) == (0, True)
    names = [row[0] for row in run_grid(report).rows]
    assert "allocated peak, steady step" in names
    assert "reserved peak, steady step" in names


def test_a_script_that_resets_its_peak_hides_none_from_the_report() -> None:
    model = nn.Linear(256, 256).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    most_bytes = 0
    with memwall.fit(model, optimizer, budget="4GiB") as session:
        for _ in range(3):
            loss = model(torch.randn(16_384, 256, device="cuda")).square().mean()
            most_bytes = max(most_bytes, torch.cuda.max_memory_allocated())
            loss.backward()
            del loss
            torch.cuda.reset_peak_memory_stats()
            optimizer.step()
            optimizer.zero_grad()
        assert run_report(session).measured.peak.allocated_bytes >= most_bytes > 32 * MIB
