"""Saved tensors of a CUDA device that leave in a byte an element: gradients as on a CPU, and bytes as foreseen."""

from pathlib import Path

import pytest
import torch
from plans import a_plan
from torch import Tensor, nn

import memwall
from memwall.machine.hardware import hardware_named
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.techniques.offload import LeavingForm, Offload
from memwall.predict.packed_bytes import num_packed_bytes
from memwall.session.session import Session
from memwall.trace.modules import fingerprint

pytestmark = pytest.mark.timeout(300)
ROWS, WIDTH = 512, 256


def trained(device: str, form: LeavingForm, disk: Path, first: float = 0.0) -> tuple[list[Tensor], int]:
    """Returns the gradients of a step whose batch begins with a number, and the bytes that left."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    actions = [
        Offload(
            block=name,
            scope="saved",
            tier="disk" if device == "cpu" else "host",
            min_bytes=1024,
            window_bytes=8 << 20,
            form=form,
            exactness="bit-exact" if form == "exact" else "changes-numerics",
        )
        for name in "012"
    ]
    plan = a_plan(*actions, device=device, micro_batch=1, model_fingerprint=fingerprint([model]), process_bytes=1)
    x = torch.randn(ROWS, WIDTH)
    x[0, 0] = first
    with Session(plan=plan, disk=str(disk)) as session:
        session.attach(model, optimizer)
        model(x.to(device)).square().mean().backward()
        gradients = [parameter.grad.cpu() for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    return gradients, session.measured.bytes_to_tier


@pytest.mark.phantom(card="a100-80gb")
def test_gradients_are_those_of_a_cpu_and_what_is_not_finite_leaves_as_it_is(tmp_path: Path) -> None:
    exact, exact_bytes = trained("cuda", "exact", tmp_path)
    there, there_bytes = trained("cuda", "int8", tmp_path)
    here, here_bytes = trained("cpu", "int8", tmp_path)
    assert there_bytes == here_bytes
    assert there_bytes % num_packed_bytes(ROWS * WIDTH) == 0
    assert there_bytes < 0.27 * exact_bytes
    assert all(map(torch.equal, there, here))
    assert not any(map(torch.equal, there[::2], exact[::2]))
    _, infinite_bytes = trained("cuda", "int8", tmp_path, first=float("inf"))
    assert infinite_bytes > there_bytes


@pytest.mark.phantom(card="a100-80gb", numbers=False, context_bytes=32 << 20, order="timed", time="roofline")
def test_a_plan_packs_where_the_link_is_what_a_step_waits_for() -> None:
    """GIVEN that it is allowed WHEN a session plans for a budget THEN less is moved, and bytes are as foreseen."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(12))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(65_536, 64, device="cuda")
    with memwall.fit(model, optimizer, budget="298MiB", allow=("low-bit-offload",)) as session:
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert session.plan is not None
    assert session.trace is not None
    forecast = session.plan.forecast
    exact = make_plan(session.trace, Settings(budget_bytes=forecast.budget_bytes or 0)).forecast
    assert "int8" in {action.form for action in session.plan.actions if isinstance(action, Offload)}
    assert forecast.moved_bytes_per_step < exact.moved_bytes_per_step
    assert 1.05 * (forecast.step_seconds or 0.0) < (exact.step_seconds or 0.0)
    bandwidth = hardware_named("a100-80gb").memory_bytes_per_second
    assert session.trace.machine.pack_seconds_per_element == 10 / bandwidth
    assert session.measured.last_peak_bytes == forecast.phases["steady_step"].process_bytes
