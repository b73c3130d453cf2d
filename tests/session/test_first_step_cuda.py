"""The first step of a run on a CUDA device is recorded, and leaves the heap of CPU tensors as it is."""

from typing import Any

import pytest
import torch
from plans import a_plan
from torch import nn

import memwall
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.errors import OutOfMemoryError
from memwall.patches import active
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.trace.modules import fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]


def test_the_budget_of_a_device_does_not_steer_the_heap_of_cpu_tensors() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with memwall.fit(model, optimizer, budget="50%") as session:
        for _ in range(2):
            model(torch.randn(4, 8, device="cuda")).sum().backward()
            assert not any("malloc" in change.where or "mallopt" in change.where for change in active())
            optimizer.step()
            optimizer.zero_grad()
    assert session.plan is not None
    assert session.measured.num_steps == 2


def train(model: nn.Module, **options: Any) -> None:
    """Takes three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with memwall.fit(model, optimizer, **options):
        for step in range(3):
            model(torch.full((4, 1024), 0.1 * step, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def wide() -> nn.Module:
    """Weights of 64 MiB, and as much of gradients; twice as much state."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(16))).cuda()


SMALL = pytest.mark.phantom(card="a100-80gb", numbers=False, memory_bytes=250 << 20, context_bytes=32 << 20)


@SMALL
def test_state_that_the_first_step_has_no_room_for_is_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StateKeeper, "spill_recorded", lambda *_, **__: False)  # as of an optimizer stepped as a whole
    with pytest.raises(OutOfMemoryError, match=r"optimizer step of step 1.*`memwall plan SPEC .*`memwall run --plan`"):
        train(wide(), budget="240MiB")


@SMALL
def test_the_way_out_trains_where_there_is_room_for_weights_and_gradients_alone() -> None:
    model = wide()
    away = OptimizerPlacement(tier="host", resident_bytes=0, bucket_bytes=8 << 20, min_bytes=1 << 10)
    given = a_plan(away, device="cuda", model_fingerprint=fingerprint([model]), process_bytes=240 << 20)
    train(model, plan=given)
    assert torch.cuda.max_memory_allocated() < 210 << 20
