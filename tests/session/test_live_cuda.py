"""A session on a CUDA device: its link is measured, and what its own plan has in host memory changes no bit."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import memwall
from memwall.machine.link_speed import probe_link
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.session.session import Session

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


def trained(num_rows: int, **options: Any) -> tuple[list[float], Session | None]:
    """The losses of a run, with or without a budget or a plan, and its session."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(24))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator("cuda").manual_seed(1)
    losses = []
    with memwall.fit(model, optimizer, **options) if options else nullcontext() as session:
        for _ in range(NUM_STEPS):
            loss = model(torch.randn(num_rows, 1024, device="cuda", generator=batches)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, session


# 24 layers of width 1024: computed on CPUs for the phantom device, it takes minutes.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("num_rows", "kind"), [(8, OptimizerPlacement), (32768, Offload)], ids=["state", "activations"]
)
def test_a_session_with_a_plan_for_host_memory_trains_to_the_same_bits(
    num_rows: int, kind: type[OptimizerPlacement | Offload]
) -> None:
    plain, _ = trained(num_rows)
    ample, loose = trained(num_rows, budget=torch.cuda.get_device_properties(0).total_memory)
    assert loose is not None
    assert loose.plan is not None
    assert loose.trace is not None
    least_bytes = loose.plan.forecast.smallest_feasible_budget_bytes
    assert least_bytes is not None
    given = None
    if kind is OptimizerPlacement:  # a first step that is recorded has all of the state on the device
        less_bytes = loose.plan.forecast.steady_process_bytes - 64 * MIB
        given = make_plan(loose.trace, Settings(budget_bytes=less_bytes))
    tight, session = trained(num_rows, **({"budget": least_bytes + 64 * MIB} if given is None else {"plan": given}))
    assert session is not None
    assert session.plan is not None
    assert {action.tier for action in session.plan.actions if isinstance(action, kind)} == {"host"}
    assert plain == ample == tight
