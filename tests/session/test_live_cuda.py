"""A session on a CUDA device: its link is measured, and what its own plan has in host memory changes no bit."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import memwall
from memwall.machine.link_speed import probe_link
from memwall.planning.planfile import Plan
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
MIB = 1 << 20
NUM_STEPS = 4


def test_the_link_is_measured_without_a_trace_in_the_devices_memory() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    before_bytes = torch.cuda.memory_reserved(device)
    host = probe_link(device, limit_bytes=64 * MIB)
    assert min(host.write_bytes_per_second, host.read_bytes_per_second) > 0
    assert torch.cuda.memory_reserved(device) == before_bytes


def trained(num_rows: int, budget_bytes: int | None) -> tuple[list[float], Plan | None]:
    """The losses of a run, with or without a budget, and the plan it made."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator("cuda").manual_seed(1)
    losses = []
    with nullcontext() if budget_bytes is None else memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for _ in range(NUM_STEPS):
            loss = model(torch.randn(num_rows, 1024, device="cuda", generator=batches)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, None if session is None else session.plan


# 24 layers of width 1024: computed on CPUs for the phantom device, it takes minutes.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_rows", "kind"), [(8, OptimizerPlacement), (32768, Offload)], ids=["state", "activations"]
)
def test_a_session_that_plans_with_host_memory_trains_to_the_same_bits(
    num_rows: int, kind: type[OptimizerPlacement | Offload]
) -> None:
    plain, _ = trained(num_rows, None)
    ample, loose = trained(num_rows, torch.cuda.get_device_properties(0).total_memory)
    assert loose is not None
    least_bytes = loose.forecast.smallest_feasible_budget_bytes
    assert least_bytes is not None
    tight, plan = trained(num_rows, least_bytes + 64 * MIB)
    assert plan is not None
    assert {action.tier for action in plan.actions if isinstance(action, kind)} == {"host"}
    assert plain == ample == tight
