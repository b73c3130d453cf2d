"""The window of a device's offloads is the plan's: what the link can carry beside the kernels costs no time."""

import pytest
import torch
from fake_steps import record_fake
from torch import nn

from memwall.machine.hardware import hardware_named
from memwall.planning.menu import WINDOW_BYTES
from memwall.planning.search import plan
from memwall.planning.techniques.offload import Offload
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.roofline import Roofline
from memwall.trace.workload import Workload

GIB = 1 << 30
ROWS, WIDTH, NUM_LAYERS = 65_536, 4096, 8


@pytest.mark.parametrize("device", ["h200"])
def test_tensors_larger_than_the_least_window_leave_beside_the_kernels(device: str) -> None:
    """GIVEN layers in float32, whose kernels take longer than their tensors on the link THEN moving these is hidden."""
    hardware = hardware_named(device)
    workload = Workload(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(NUM_LAYERS))),
        batch=lambda: torch.ones(ROWS, WIDTH),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    recording = recording_for(hardware)
    fake = record_fake(
        workload,
        target="cuda",
        seconds_of=Roofline(hardware),
        workspaces=recording.workspaces,
        choices=recording.choices(),
    )
    trace = translated(fake, hardware, host_bytes=256 * GIB)
    roomy = plan(trace, budget="100GiB", hardware=hardware).forecast
    budget_bytes = roomy.peak.process_bytes + roomy.margin_bytes - 5 * GIB
    tight = plan(trace, budget=budget_bytes, tier_capacity_bytes=256 * GIB, hardware=hardware).forecast
    offloads = [action for action in tight.actions if isinstance(action, Offload)]
    block_bytes = 2 * 4 * ROWS * WIDTH
    assert tight.fits
    assert roomy.actions == ()
    assert {action.window_bytes for action in offloads} == {block_bytes}
    assert block_bytes > WINDOW_BYTES
    assert tight.step_seconds is not None
    assert roomy.step_seconds is not None
    assert tight.step_seconds < 1.01 * roomy.step_seconds
