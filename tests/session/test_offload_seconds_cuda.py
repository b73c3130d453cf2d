"""On the modelled clock a step whose saved tensors leave takes as long as its plan foresees. Simulated."""

import pytest
import torch
from torch import nn

import memwall
from memwall.planning.techniques.offload import Offload

pytestmark = pytest.mark.phantom(
    card="a100-80gb", order="timed", time="roofline", numbers=False, context_bytes=32 << 20
)
MIB = 1 << 20
ROWS, NUM_LAYERS = 32_768, 8


@pytest.mark.parametrize(("width", "share"), [(512, 0.4), (1024, 0.6)])
def test_a_step_takes_as_long_as_its_plan_foresees(width: int, share: float) -> None:
    """GIVEN layers too narrow, or wide enough, for the link WHEN tensors leave THEN the plan says how long it takes."""
    layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(NUM_LAYERS))
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.zeros(ROWS, width, device="cuda")
    saved_bytes = NUM_LAYERS * 3 * x.nbytes
    budget_bytes = int(torch.cuda.memory_allocated() + 32 * MIB + share * saved_bytes + 2 * x.nbytes)
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            end.record()
            end.synchronize()
    assert session.plan is not None
    assert any(isinstance(action, Offload) for action in session.plan.actions)
    assert float(begin.elapsed_time(end)) / 1e3 == pytest.approx(session.plan.forecast.step_seconds, rel=0.01)
