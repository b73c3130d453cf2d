"""What may be done with a block: never what a second run of it would change."""

from collections.abc import Callable

import msgspec
import pytest
import torch
from plans import LINK
from torch import Tensor, nn

from memwall.planning.block_problem import build_menus
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import Costs
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import step_seconds
from memwall.predict.treatment import StepModel
from memwall.trace.trace_builder import record
from memwall.trace.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


class Stateful(nn.Module):
    """Writes to a buffer of its own, as a running mean or the power iteration of spectral_norm does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.down(torch.sin(self.up(x - self.mean)))


class InPlaceFirst(nn.Module):
    """Overwrites what it is called with, as a pre-activation block may."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.relu = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(self.relu(x))))


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.sin(self.up(self.norm(x))))


def menu_names(
    layer: Callable[[int], nn.Module],
    pack_seconds_per_element: float | None = None,
    lost: tuple[tuple[str, str], ...] = (),
) -> list[set[str]]:
    torch.manual_seed(0)
    trace = record(
        Workload(
            model=nn.Sequential(nn.Linear(16, 16), *(layer(16) for _ in range(3))),
            batch=torch.randn(64, 16),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        num_steps=1,
    )
    step = trace.steps[0]
    blocks = tuple(block for block in find_blocks(trace, step) if block.path in "123")
    costs = Costs(
        copy_seconds_per_byte=0.0,
        min_bytes=1024,
        link=LINK,
        pack_seconds_per_element=pack_seconds_per_element,
        lost=lost,
    )
    menus = build_menus(trace, StepModel(step, trace.names, blocks), costs)
    assert len(menus) == 3
    return [{option.name for option in menu.options} for menu in menus]


@pytest.mark.parametrize(
    ("op_seconds", "launch_seconds", "runs_ahead", "least", "most"),
    [
        (1e-3, 0.0, False, 650e-6, 650e-6),
        (0.0, 0.0, True, 650e-6, 650e-6),
        # A device that is busy for longer than the host, by more or by less than Python's work takes.
        (1e-3, 0.0, True, 0.0, 0.0),
        (12e-6, 0.0, True, 400e-6, 649e-6),
        # A host that was measured to issue operations slower than the device does them.
        (1e-3, 2e-3, True, 650e-6, 650e-6),
    ],
    ids=["host", "idle-device", "busy-device", "nearly-idle", "slow-host"],
)
def test_pythons_work_costs_what_the_device_does_not_hide(
    op_seconds: float, launch_seconds: float, runs_ahead: bool, least: float, most: float
) -> None:
    torch.manual_seed(0)
    trace = record(
        Workload(
            model=nn.Sequential(nn.Linear(16, 16), *(Normed(16) for _ in range(3))),
            batch=torch.randn(64, 16),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        num_steps=1,
    )
    ops = tuple(msgspec.structs.replace(op, seconds=op_seconds) for op in trace.steps[0].ops)
    step = msgspec.structs.replace(trace.steps[0], ops=ops, launch_seconds=launch_seconds)
    assert step_seconds(step) == pytest.approx(max(op_seconds, launch_seconds) * len(ops))
    blocks = tuple(block for block in find_blocks(trace, step) if block.path in "123")
    model = StepModel(step, trace.names, blocks)
    costs = Costs(copy_seconds_per_byte=0.0, min_bytes=1024, runs_ahead=runs_ahead)
    full = Treatment(recompute=True, min_bytes=1024)
    for menu, block in zip(build_menus(trace, model, costs), blocks, strict=True):
        ((_, again),) = model.repeated_ops(block.calls[0], block.saved[0], full)
        found = menu.options[1].extra_seconds - op_seconds * len(again)
        assert least - 1e-9 <= found <= most + 1e-9


@pytest.mark.parametrize("layer", [Stateful, InPlaceFirst])
def test_what_a_second_run_would_change_is_offered_for_moving_only(layer: Callable[[int], nn.Module]) -> None:
    assert menu_names(layer) == [{"keep", "offload"}] * 3


def test_batch_norm_is_offered_since_the_executor_spares_its_statistics() -> None:
    assert all({"keep", "full", "offload"} <= names for names in menu_names(Normed))


def test_a_block_that_a_run_found_not_to_repeat_itself_is_offered_for_moving_only() -> None:
    first, second, third = menu_names(Normed, lost=(("recompute", "2"),))
    assert second == {"keep", "offload"}
    assert "full" in first & third


def test_where_numbers_may_leave_packed_both_ways_are_offered_but_not_for_what_runs_again() -> None:
    assert menu_names(Stateful, 1e-9) == [{"keep", "offload", "offload as int8"}] * 3
    for names in menu_names(Normed, 1e-9):
        assert {"offload as int8", "full+offload"} <= names
        assert "full+offload as int8" not in names


class Noisy(nn.Module):
    """Draws twice; what is drawn first is the costliest thing to make and would be kept first."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = torch.sin(y * torch.rand_like(y))
        return self.down(y * torch.rand_like(y))


def test_of_several_random_operations_only_the_last_is_ever_kept() -> None:
    """One that is kept draws nothing in the second run, and those after it would draw other numbers."""
    torch.manual_seed(0)
    trace = record(
        Workload(
            model=nn.Sequential(*(Noisy(16) for _ in range(3))),
            batch=torch.randn(64, 16),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        num_steps=1,
    )
    step = trace.steps[0]
    is_random = [trace.names[op.name] == "aten.rand_like.default" for op in step.ops]
    ops = tuple(
        msgspec.structs.replace(op, seconds=1.0 if random else 1e-3)
        for op, random in zip(step.ops, is_random, strict=True)
    )
    model = StepModel(msgspec.structs.replace(step, ops=ops), trace.names, find_blocks(trace, step))
    costs = Costs(copy_seconds_per_byte=0.0, min_bytes=1024)
    for menu in build_menus(trace, model, costs):
        kept = {number for treatment in menu.treatments if treatment for number in treatment.kept_ops}
        drawn = [number for number, name in enumerate(menu.op_names) if name == "aten.rand_like.default"]
        assert len(drawn) == 2
        assert drawn[0] not in kept
        assert drawn[1] in kept


def test_what_is_overwritten_is_not_kept_where_a_call_without_a_backward_came_first() -> None:
    """GIVEN norms whose results are written in place WHEN the model is first called for its values alone THEN no
    result of a norm is kept: backward would be given what was written."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        model(batch)
        return model(batch).square().mean()

    def block() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ReLU(inplace=True))

    trace = record(
        Workload(
            model=lambda: nn.Sequential(*(block() for _ in range(3))),
            batch=lambda: torch.randn(2, 4, 16, 16),
            loss=loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        num_steps=1,
    )
    step, norm = trace.steps[0], "aten.native_batch_norm.default"
    ops = tuple(msgspec.structs.replace(op, seconds=1.0 if trace.names[op.name] == norm else 0.3) for op in step.ops)
    model = StepModel(msgspec.structs.replace(step, ops=ops), trace.names, find_blocks(trace, step))
    menus = build_menus(trace, model, Costs(copy_seconds_per_byte=0.0, min_bytes=1024))
    kept = {menu.op_names[number] for menu in menus for one in menu.treatments if one for number in one.kept_ops}
    assert any(norm in menu.op_names for menu in menus)
    assert norm not in kept


class Looping(nn.Module):
    """Finds what is largest again and again, as a search for far points does: results of a few bytes among others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        for _ in range(3):
            y = torch.sin(y) * y.amax(1, keepdim=True)
        return self.down(y)


def test_results_of_a_few_bytes_are_not_kept_on_a_cpu() -> None:
    """GIVEN results of 256 bytes that cost as much to make as large ones WHEN sets to keep are made THEN none has them.

    Malloc, which has small tensors, puts them into the gaps that the next ones of the loop would have filled again.
    """
    trace = record(
        Workload(
            model=nn.Sequential(*(Looping(16) for _ in range(3))),
            batch=torch.randn(64, 16),
            loss=lambda model, batch: model(batch).square().mean(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        ),
        num_steps=1,
    )
    step = trace.steps[0]
    ops = tuple(msgspec.structs.replace(op, seconds=1e-3) for op in step.ops)
    model = StepModel(msgspec.structs.replace(step, ops=ops), trace.names, find_blocks(trace, step))
    menus = build_menus(trace, model, Costs(copy_seconds_per_byte=0.0, min_bytes=1024))
    kept = {menu.op_names[number] for menu in menus for one in menu.treatments if one for number in one.kept_ops}
    assert all("aten.amax.default" in menu.op_names for menu in menus)
    assert "aten.sin.default" in kept
    assert "aten.amax.default" not in kept
