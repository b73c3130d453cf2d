"""A step recorded with foreach kernels, as it would be with the optimizer's fused one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_steps import record_fake

from memwall.machine.hardware import hardware_named
from memwall.predict.cuda.fused_optimizer import can_fuse, with_fused_optimizer
from memwall.predict.cuda.translate import recording_for, translated
from memwall.predict.cuda_allocator.step_peaks import step_peaks
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.trace.records import Trace
from memwall.trace.workload import Workload

A100 = hardware_named("a100-80gb")
PROFILE, _ = profile_for("2.13.0")
Make = Callable[[Any, bool | None], torch.optim.Optimizer]
FUSABLE: dict[str, Make] = {
    "AdamW": lambda parameters, fused: torch.optim.AdamW(parameters, fused=fused),
    "Adam with weight decay": lambda parameters, fused: torch.optim.Adam(parameters, weight_decay=0.1, fused=fused),
    "AMSGrad": lambda parameters, fused: torch.optim.Adam(parameters, amsgrad=True, fused=fused),
    "SGD with momentum and weight decay": lambda parameters, fused: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, weight_decay=0.1, fused=fused
    ),
}


def traced(
    make: Callable[[Any], torch.optim.Optimizer], dtype: torch.dtype = torch.float32, *, width: int = 512
) -> Trace:
    workload = Workload(
        model=lambda: torch.nn.Sequential(*(torch.nn.Linear(width, width, dtype=dtype) for _ in range(6))),
        batch=lambda: torch.ones(8, width, dtype=dtype),
        loss=lambda model, batch: model(batch).sum(),
        optimizer=make,
    )
    recording = recording_for(A100)
    trace = record_fake(workload, target="cuda", workspaces=recording.workspaces, choices=recording.choices())
    return translated(trace, A100)


@pytest.mark.parametrize("width", [512, 2048])  # of the wider, no cached segment has room for a temporary
@pytest.mark.parametrize("name", FUSABLE)
def test_it_holds_what_a_recording_with_the_fused_kernel_holds(name: str, width: int) -> None:
    """GIVEN foreach kernels THEN the changed step's peaks are those of `fused=True`, and lower than its own."""
    make = FUSABLE[name]
    foreach, fused = traced(lambda p: make(p, None), width=width), traced(lambda p: make(p, True), width=width)
    assert can_fuse(foreach)
    assert not can_fuse(fused)
    changed = step_peaks(with_fused_optimizer(foreach).steps, PROFILE)
    assert changed == step_peaks(fused.steps, PROFILE)
    before = step_peaks(foreach.steps, PROFILE)
    assert changed is not None
    assert before is not None
    assert changed[-1].reserved_bytes < before[-1].reserved_bytes


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda p: torch.optim.NAdam(p), id="no fused kernel"),
        pytest.param(lambda p: torch.optim.AdamW(p, foreach=False), id="neither"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), id="no temporaries"),
    ],
)
def test_it_is_not_offered_where_it_cannot_be_or_saves_nothing(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    assert not can_fuse(traced(make))
