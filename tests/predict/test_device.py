"""The process of a translated trace on its device: context, reserved bytes, margin."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import nn

from memwall.predict.cuda_allocator.versions import profile_for
from memwall.predict.curve import live_peak_bytes
from memwall.predict.device import MARGIN_SHARE, DeviceModel, as_first, margin_bytes, step_peaks
from memwall.predict.hardware import hardware_named
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

MIB = 1 << 20

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trace(workload_of: Callable[..., Workload], recorded: Callable[..., Trace]) -> Trace:
    """A model whose tensors are larger than the smallest blocks."""
    workload = workload_of(
        lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))),
        lambda: torch.ones(1024, 512),
        optimizer=torch.optim.AdamW,
    )
    return recorded(workload, "a100-80gb")


def test_the_first_step_is_the_steady_one_in_which_state_appears(trace: Trace) -> None:
    first, steady = as_first(trace.steps[-1]), trace.steps[-1]
    start = next(number for number, op in enumerate(steady.ops) if op.phase == "optimizer")
    appearing = [s for s in first.storages if s.category == "optimizer_state" and s.device == "cuda"]
    assert {s.birth for s in appearing} == {start}
    assert sum(s.nbytes for s in appearing) == 2 * sum(s.nbytes for s in steady.storages if s.category == "parameter")


def test_reserved_is_what_the_allocator_holds(trace: Trace) -> None:
    """Segments of at least 2 MiB, never fewer bytes than are alive; the first step needs no more than the next."""
    profile, _ = profile_for("2.13.0")
    peaks = step_peaks(trace.steps, profile)
    assert peaks is not None
    assert len(peaks) == 3
    assert all(peak.reserved_bytes % (2 * MIB) == 0 for peak in peaks)
    assert all(peak.reserved_bytes >= peak.live_bytes for peak in peaks)
    assert [peak.live_bytes for peak in peaks] == [live_peak_bytes(trace.steps[n], "cuda") for n in (0, 1, 1)]
    assert all(before.reserved_bytes <= after.reserved_bytes for before, after in itertools.pairwise(peaks))


def test_a_device_that_is_too_small_runs_out_of_memory(trace: Trace) -> None:
    profile, _ = profile_for("2.13.0")
    needed = max(peak.live_bytes for peak in step_peaks(trace.steps, profile) or ())
    assert step_peaks(trace.steps, profile, capacity_bytes=needed // 2) is None


def test_the_process_is_context_plus_reserved_with_a_margin_that_says_where_it_comes_from(trace: Trace) -> None:
    hardware = hardware_named("a100-80gb")
    model = DeviceModel(trace, hardware, "2.13.0")
    resident = model.untreated(trace.steps[-1])
    peaks = step_peaks((as_first(trace.steps[-1]), trace.steps[-1]), model.profile)
    reserved = max(peak.reserved_bytes for peak in peaks or ())
    low, high = hardware.context_bytes
    assert resident.process_bytes == low + reserved
    assert margin_bytes(hardware, reserved) == high - low + int(MARGIN_SHARE * reserved)
    budget = model.budget_for(resident.process_bytes)
    assert resident.process_bytes + model.margin_bytes(budget) <= budget
    assert resident.process_bytes + model.margin_bytes(budget - 4) > budget - 4
