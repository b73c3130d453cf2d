"""The allocator's settings as part of a plan for a device: free of cost, so tried before anything is recomputed."""

from itertools import pairwise

import msgspec
import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.machine.hardware import Hardware
from memwall.planning.planfile import Plan, decoded
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.device import DeviceModel
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.trace.workload import Workload

_MIB = 1 << 20
ROWS, WIDTHS = 3_000, (512, 1024, 700, 1600, 512)

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trace(hardware: Hardware) -> Trace:
    """Layers of unequal widths, whose tensors of 1 to 20 MiB leave pieces of segments unused."""
    workload = Workload(
        model=lambda: nn.Sequential(*(m for a, b in pairwise(WIDTHS) for m in (nn.Linear(a, b), nn.GELU()))),
        batch=lambda: torch.ones(ROWS, WIDTHS[0]),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=torch.optim.AdamW,
    )
    recording = recording_for(hardware)
    fake = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(fake, hardware)


def planned(trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
    return make_plan(trace, Settings(budget_bytes=budget_bytes, hardware=hardware))


def budget_under_settings(trace: Trace, hardware: Hardware) -> int:
    """The smallest budget with room for the margin under the best settings."""
    model = DeviceModel(trace, hardware)
    return model.budget_for(model.base_bytes + model.allocator_advice.reserved_bytes)


def test_settings_that_make_the_budget_fit_are_the_whole_plan(trace: Trace, hardware: Hardware) -> None:
    """GIVEN a budget that the default settings miss WHEN the best ones keep to it THEN nothing else is done."""
    plan = planned(trace, hardware, budget_under_settings(trace, hardware))
    advice = plan.forecast.allocator
    assert advice is not None
    (action,) = plan.actions
    assert isinstance(action, AllocatorReuse)
    assert action.cuda_setting == advice.settings
    assert (action.saved_bytes, action.exactness) == (advice.saved_bytes, "bit-exact")
    assert plan.forecast.fits
    assert plan.forecast.peak.reserved_bytes == advice.reserved_bytes < advice.default_reserved_bytes
    assert plan.forecast.step_seconds == plan.forecast.plain_step_seconds


def test_a_run_that_fits_is_left_alone_and_told_what_it_could_set(trace: Trace, hardware: Hardware) -> None:
    plan = planned(trace, hardware, hardware.usable_bytes)
    assert plan.actions == ()
    assert plan.forecast.allocator is not None
    assert plan.forecast.allocator.saved_bytes > 0


def test_the_smallest_feasible_budget_counts_on_the_settings(trace: Trace, hardware: Hardware) -> None:
    model = DeviceModel(trace, hardware)
    least = planned(trace, hardware, hardware.usable_bytes).forecast.smallest_feasible_budget_bytes
    assert least is not None
    assert least <= budget_under_settings(trace, hardware)
    assert least < model.budget_for(model.untreated(steady_step(trace)).process_bytes)


def test_the_plan_file_keeps_the_string(trace: Trace, hardware: Hardware) -> None:
    plan = planned(trace, hardware, budget_under_settings(trace, hardware))
    again = decoded(msgspec.json.decode(msgspec.json.encode(plan)), Plan)
    assert [action.cuda_setting for action in again.actions if isinstance(action, AllocatorReuse)] == [
        plan.forecast.allocator.settings if plan.forecast.allocator else ""
    ]


def test_the_forecast_under_the_settings_is_the_simulated_allocators(trace: Trace, hardware: Hardware) -> None:
    model = DeviceModel(trace, hardware)
    steady = steady_step(trace)
    plain, steered = model.untreated(steady), model.treated(steady, 0)
    assert (plain.is_default, plain.cuda_setting) == (True, "")
    assert (steered.is_default, steered.cuda_setting) == (False, model.allocator_advice.settings)
    assert plain.process_bytes - steered.process_bytes == steered.saved_bytes == model.allocator_advice.saved_bytes
