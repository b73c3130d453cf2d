"""A budget on a CUDA device holds from the first step on, which is recorded; where that has no room it is refused."""

import gc
import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memwall
from memwall.apply.optimizer_state.state_keeper import StateKeeper
from memwall.errors import InfeasibleError
from memwall.machine.link_speed import probe_link
from memwall.machine.meter import CudaMeter
from memwall.session.device_budget import DeviceBudget
from memwall.session.session import Session
from memwall.store.room import CudaLimit

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
MIB = 1 << 20
PLACE = torch.device("cuda", 0)
ROWS = (32 << 10, 64)
EXACT = pytest.mark.phantom(card="a100-80gb", numbers=False, context_bytes=32 << 20)


class Rows(nn.Module):
    """Layers of unlike widths: what one of them frees is too small for the next, and free segments pile up."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 96, 144, 208, 304, 64)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(widths)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def trained(budget_bytes: int, make_model: Callable[[], nn.Module] = Rows, shape: tuple[int, int] = ROWS) -> Session:
    """Takes three steps."""
    gc.collect()  # a model that was refused may be part of a cycle
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = make_model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(*shape, device="cuda")
    with memwall.fit(model, optimizer, budget=budget_bytes) as session:
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return session


def refused(*arguments: Any, train: Callable[..., object] = trained) -> tuple[int, str]:
    """Returns what a refusal tells, and its words, without the frames that hold what was trained."""
    try:
        train(*arguments)
    except InfeasibleError as error:
        return error.smallest_feasible_bytes, str(error)
    raise AssertionError("was not refused")


@pytest.fixture
def held() -> Iterator[DeviceBudget]:
    made = DeviceBudget()
    yield made
    made.lift()


def limit_bytes() -> int:
    return int(torch.cuda.get_per_process_memory_fraction() * torch.cuda.get_device_properties(0).total_memory)


@EXACT
def test_the_first_step_gives_free_segments_back_before_it_passes_the_budget() -> None:
    plain_bytes = trained(4096 * MIB).measured.first_step_peak_bytes
    session = trained(plain_bytes - 10 * MIB)
    assert 0 < session.measured.first_step_peak_bytes <= session.budget_bytes
    assert session.measured.overall_peak_bytes <= session.budget_bytes
    assert torch.cuda.get_per_process_memory_fraction() == 1


@EXACT
def test_a_budget_without_room_for_the_first_step_is_refused_with_one_that_holds() -> None:
    """GIVEN a budget of which the first step needs more WHEN that has ended THEN the run is, and is told enough."""
    told_bytes, _ = refused(48 * MIB)
    session = trained(told_bytes)
    assert session.plan is not None
    assert session.measured.num_steps == 3
    assert session.measured.overall_peak_bytes <= told_bytes


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


def weights_of(budget_bytes: int, options: dict[str, bool]) -> tuple[str, Session | None]:
    """Returns a digest of the weights after four steps, under a budget if it is not 0."""
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = wide().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    with memwall.fit(model, optimizer, budget=budget_bytes) if budget_bytes else nullcontext() as session:
        for _ in range(4):
            model(torch.randn(16, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().cpu().numpy().tobytes())
    return found.hexdigest(), session


@pytest.mark.phantom(card="a100-80gb", context_bytes=32 << 20)
@pytest.mark.parametrize("options", [{}, {"foreach": False}, {"fused": True}], ids=["foreach", "for-loop", "fused"])
@pytest.mark.parametrize("budget_mib", [140, 170, 205, 220])
def test_state_that_has_no_room_in_the_first_step_leaves_as_it_is_made(
    budget_mib: int, options: dict[str, bool]
) -> None:
    """GIVEN 32 MiB of parameters and 64 of state WHEN a budget has no room for them with what a step makes besides
    THEN the run starts, keeps the budget from the first step on, and has the weights of a plain one."""
    expected, _ = weights_of(0, options)
    budget_bytes = budget_mib * MIB
    found, session = weights_of(budget_bytes, options)
    assert found == expected
    assert session is not None
    assert session.measured.first_step_peak_bytes <= budget_bytes
    assert session.measured.overall_peak_bytes <= budget_bytes


@EXACT
def test_a_first_step_that_needs_more_than_any_plan_is_told_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a step whose state cannot leave as it is made WHEN it has no room for it THEN that is said."""
    monkeypatch.setattr(StateKeeper, "spill_recorded", lambda *_, **__: False)

    def wider() -> nn.Module:
        return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4)))

    told_bytes, said = refused(240 * MIB, wider, (4, 2048))
    assert re.search(r"the first step held .*`memwall plan SPEC .*`memwall run --plan`", said)
    assert trained(told_bytes, wider, (4, 2048)).measured.overall_peak_bytes <= told_bytes


def test_what_grows_beside_segments_is_taken_off_the_first_step(
    held: DeviceBudget, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.cuda.empty_cache()
    meter = CudaMeter(PLACE)
    held.hold(meter, meter.now_bytes() + 64 * MIB)
    held.begin_recording()
    before_bytes, beside_bytes = limit_bytes(), meter.base_bytes(0)
    free = torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
    del free
    monkeypatch.setattr(meter, "base_bytes", lambda _: beside_bytes + 40 * MIB)
    held.look_beside()
    assert limit_bytes() == pytest.approx(before_bytes - 40 * MIB, abs=1)
    assert torch.cuda.memory_reserved() <= limit_bytes()
    held.end_recording()
    assert torch.cuda.get_per_process_memory_fraction() == 1


def test_the_link_is_measured_within_the_room_that_there_is() -> None:
    torch.cuda.empty_cache()
    limit = CudaLimit()
    limit.hold(PLACE, torch.cuda.memory_reserved() + 4 * MIB)
    torch.cuda.reset_peak_memory_stats()
    tier = probe_link(PLACE, limit_bytes=64 * MIB)
    assert tier.write_bytes_per_second > 0
    assert torch.cuda.max_memory_reserved() <= limit_bytes()
    limit.lift()
