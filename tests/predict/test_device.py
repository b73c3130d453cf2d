"""The process of a translated trace on its device: context, reserved bytes, margin."""

import itertools
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.predict.curve import live_peak_bytes
from memwall.predict.device import DeviceModel, as_first, convolution_bytes, margin_bytes
from memwall.trace.records import Storage, Trace
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
    """Segments of at least 2 MiB, never fewer bytes than are handed out; the first step needs no more than the next."""
    profile, _ = profile_for("2.13.0")
    peaks = step_peaks(trace.steps, profile)
    assert peaks is not None
    assert len(peaks) == 3
    assert all(peak.reserved_bytes % (2 * MIB) == 0 for peak in peaks)
    assert all(peak.reserved_bytes >= peak.allocated_bytes for peak in peaks)
    assert all(before.reserved_bytes <= after.reserved_bytes for before, after in itertools.pairwise(peaks))


def test_allocated_is_what_torch_counts(trace: Trace) -> None:
    """Blocks, not tensors: rounded to 512 bytes, with remainders that are too small to be of use to anybody else."""
    profile, _ = profile_for("2.13.0")
    for peak, number in zip(step_peaks(trace.steps, profile) or (), (0, 1, 1), strict=True):
        live_bytes = live_peak_bytes(trace.steps[number], "cuda")
        assert peak.allocated_bytes % 512 == 0
        assert live_bytes <= peak.allocated_bytes < 1.05 * live_bytes


def test_the_peak_of_what_is_allocated_is_the_simulated_allocators(trace: Trace) -> None:
    """GIVEN one tensor of 1 MiB and a byte, which is cut from a segment of 20 MiB, and one of a byte."""
    profile, _ = profile_for("2.13.0")
    step = msgspec.structs.replace(
        trace.steps[1],
        ops=trace.steps[1].ops[:3],
        storages=tuple(
            msgspec.structs.replace(
                trace.steps[1].storages[0], nbytes=nbytes, device="cuda:0", birth=0, dropped=2, death=2
            )
            for nbytes in (MIB + 1, 1)
        ),
        saved=(),
        calls=(),
        marks=(),
    )
    assert [peak.allocated_bytes for peak in step_peaks((step,), profile) or ()] == [MIB + 1024] * 2


def test_a_device_that_is_too_small_runs_out_of_memory(trace: Trace) -> None:
    profile, _ = profile_for("2.13.0")
    needed = max(peak.allocated_bytes for peak in step_peaks(trace.steps, profile) or ())
    assert step_peaks(trace.steps, profile, capacity_bytes=needed // 2) is None


def test_what_a_full_allocator_has_kept_is_given_back_before_the_next_step(trace: Trace) -> None:
    """GIVEN room for 52 MiB AND a step in which 12 MiB take the place of others, beside which it needs 40 for a moment
    WHEN it is repeated THEN the 12 MiB do not lie in the 40 that the step before has left, as a session empties those.
    """
    plain = trace.steps[1]

    def lasting(num_mib: int, birth: int, death: int) -> Storage:
        storage = plain.storages[0]
        changes = {"nbytes": num_mib * MIB, "device": "cuda:0", "birth": birth, "dropped": death, "death": death}
        return msgspec.structs.replace(storage, **changes)

    storages = (lasting(12, -1, 1), lasting(12, 0, 3), lasting(40, 1, 2))
    step = msgspec.structs.replace(plain, ops=plain.ops[:3], storages=storages, saved=(), calls=(), marks=())
    profile, _ = profile_for("2.13.0")
    peaks = step_peaks((step,), profile, capacity_bytes=52 * MIB)
    assert [peak.reserved_bytes for peak in peaks or ()] == [52 * MIB] * 2
    assert step_peaks((step,), profile, capacity_bytes=50 * MIB) is None


def test_the_process_is_context_plus_reserved_with_a_margin_that_says_where_it_comes_from(trace: Trace) -> None:
    hardware = hardware_named("a100-80gb")
    model = DeviceModel(trace, hardware, "2.13.0")
    resident = model.untreated(trace.steps[-1])
    peaks = step_peaks((as_first(trace.steps[-1]), trace.steps[-1]), model.profile)
    reserved = max(peak.reserved_bytes for peak in peaks or ())
    low, high = hardware.context_bytes
    assert resident.process_bytes == low + reserved
    assert model.margin_bytes(resident.process_bytes) == pytest.approx(high - low + 0.07 * reserved, abs=1)
    budget = model.budget_for(resident.process_bytes)
    assert resident.process_bytes + model.margin_bytes(budget) <= budget
    assert resident.process_bytes + model.margin_bytes(budget - 4) > budget - 4


def test_the_margin_grows_with_the_largest_convolution(recorded: Callable[..., Trace]) -> None:
    """GIVEN convolutions of 2 x 3 x 64 x 64 to 8 channels, and of those to 16: 256 and 512 KiB, 4.5 KiB of weights.

    The largest reads and writes its inputs, outputs and weights, and in backward their gradients.
    """
    workload = Workload(
        model=lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1)),
        batch=lambda: torch.ones(2, 3, 64, 64),
        loss=lambda model, batch: model(batch).square().sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    trace, hardware = recorded(workload, "a100-80gb"), hardware_named("a100-80gb")
    outer, inner, weight = (size * 4 for size in (2 * 16 * 64 * 64, 2 * 8 * 64 * 64, 16 * 8 * 9))
    assert convolution_bytes(trace) == pytest.approx(outer + 2 * inner + 2 * weight, abs=1024)
    without = margin_bytes(hardware, 1000 * MIB, 0)
    assert margin_bytes(hardware, 1000 * MIB, 100 * MIB) == pytest.approx(without + 141 * MIB, abs=1)
    model = DeviceModel(trace, hardware, "2.13.0")
    own = margin_bytes(hardware, 1000 * MIB, convolution_bytes(trace))
    assert model.margin_bytes(model.base_bytes + 1000 * MIB) == own > without
    budget = model.budget_for(model.base_bytes + 1000 * MIB)
    assert model.margin_bytes(budget) <= budget - model.base_bytes - 1000 * MIB
    process = model.base_bytes + model.room_bytes(budget)
    assert process + model.margin_bytes(process) <= budget < process + 2 + model.margin_bytes(process + 2)
    assert model.room_bytes(0) == 0
