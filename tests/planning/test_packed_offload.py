"""Saved tensors that leave in int8: where the user allowed it, and only where the step is shorter for it."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from plans import LINK, on_machine
from torch import Tensor, nn
from zoo import Case

from memwall.errors import InfeasibleError
from memwall.machine.hardware import hardware_named
from memwall.planning.block_problem import build_menus
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import Costs
from memwall.planning.planfile import Plan
from memwall.planning.search import plan
from memwall.planning.step_under_plan import step_under_plan
from memwall.planning.techniques.offload import TECHNIQUE, Offload
from memwall.predict.call_rules import Treatment
from memwall.predict.cuda.translate import translated
from memwall.predict.curve import live_peak_bytes
from memwall.predict.packed_bytes import num_packed_bytes
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step

MIB = 1 << 20
ALLOWED = ("low-bit-offload",)

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


def forms(found: Plan) -> set[str]:
    return {action.form for action in found.actions if isinstance(action, Offload)}


class Counting(nn.Module):
    """Writes to a buffer in forward, so that it cannot be run again: what it saves stays or leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls.add_(1)
        return x + self.down(torch.tanh(self.up(x)))


@pytest.fixture
def slow_disk(magnified_trace: Callable[[Case], Trace]) -> Trace:
    """A step on a machine whose disk takes 20 ns for a number each way, and 5 ns where it is packed."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Counting() for _ in range(6)))
    case = Case(model, {"x": torch.randn(512, 32)}, lambda model, batch: model(batch["x"]).square().mean())
    speeds = dict.fromkeys(("write_bytes_per_second", "read_bytes_per_second"), 2e8)
    return on_machine(magnified_trace(case), pack_seconds_per_element=1.5e-9, **speeds)


@pytest.mark.slow
def test_what_is_allowed_makes_the_step_shorter(
    slow_disk: Trace, budgets: Callable[..., list[int]], tmp_path: Path
) -> None:
    for budget_bytes in budgets(slow_disk, (0.5, 0.7)):
        exact, packed = (plan(slow_disk, budget=budget_bytes, allow=allow) for allow in ((), ALLOWED))
        assert forms(exact) == {"exact"}
        assert "int8" in forms(packed)
        lossy = [a for a in packed.actions if isinstance(a, Offload) and a.form == "int8"]
        assert {action.exactness for action in lossy} == {"changes-numerics"}
        assert 1.05 * (packed.forecast.step_seconds or 0.0) < (exact.forecast.step_seconds or 0.0)
        (lever,) = (lever for lever in packed.forecast.levers if lever.name.endswith("int8, lossy"))
        assert lever.num_blocks_used == len(lossy)
        assert any("1/254 of the largest" in reason for reason in packed.forecast.binding)
        assert not any("1/254" in reason for reason in exact.forecast.binding)
        live_bytes = live_peak_bytes(step_under_plan(slow_disk, packed), "cpu")
        assert packed.forecast.peak.allocated_bytes == live_bytes
        assert packed.forecast.peak.process_bytes + packed.forecast.margin_bytes <= budget_bytes
        packed.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == packed


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine",
    [{"pack_seconds_per_element": 1e-6}, {"write_bytes_per_second": 1e12, "read_bytes_per_second": 1e12}],
    ids=["slow packing", "fast disk"],
)
def test_digits_are_not_lost_for_little(
    slow_disk: Trace, budgets: Callable[..., list[int]], machine: dict[str, float]
) -> None:
    trace = on_machine(slow_disk, **machine)
    (budget_bytes,) = budgets(trace, (0.6,))
    allowed, plain = (plan(trace, budget=budget_bytes, allow=allow) for allow in (ALLOWED, ()))
    assert forms(allowed) == {"exact"}
    assert allowed.actions == plain.actions


@pytest.mark.slow
def test_digits_are_lost_where_the_disk_has_no_room_for_all_of_them(slow_disk: Trace) -> None:
    """Even if that is slow: nothing else fits."""
    trace = on_machine(slow_disk, pack_seconds_per_element=1e-6)
    least = plan(trace, budget="100GiB").forecast
    needed = plan(trace, budget=least.smallest_feasible_budget_bytes or 0)
    room_bytes = needed.forecast.moved_bytes_per_step // 2
    settings = {"budget": least.smallest_feasible_budget_bytes or 0, "tier_capacity_bytes": room_bytes}
    with pytest.raises(InfeasibleError):
        plan(trace, **settings)
    assert forms(plan(trace, **settings, allow=ALLOWED)) == {"int8"}


def test_a_packed_tensor_is_priced_by_its_elements(slow_disk: Trace) -> None:
    """By hand: a byte an element and what units and whole blocks of the disk add, and the seconds of each element."""
    step = steady_step(slow_disk)
    model = StepModel(step, slow_disk.names, find_blocks(slow_disk, step))
    costs = Costs(copy_seconds_per_byte=1e-9, min_bytes=MIB, link=LINK, pack_seconds_per_element=3e-9, num_passes=2)
    menu = build_menus(slow_disk, model, costs)[1]
    options = {option.name: option for option in menu.options}
    (saved,) = menu.block.saved
    large = Treatment(offload=True, min_bytes=MIB)
    storages = dict.fromkeys(step.saved[number].storage for number in saved if model.movable(number, large))
    link_bytes = num_elements = whole_bytes = 0
    for index in storages:
        storage = step.storages[index]
        first = next(step.saved[number] for number in saved if step.saved[number].storage == index)
        is_packed = storage.dtype == "float32" and first.nbytes == storage.nbytes
        num_elements += storage.nbytes // 4 if is_packed else 0
        link_bytes += num_packed_bytes(storage.nbytes // 4) if is_packed else storage.nbytes
        whole_bytes += storage.nbytes
    assert num_elements > 0
    assert options["offload"].moved_bytes == whole_bytes
    assert options["offload as int8"].moved_bytes == link_bytes
    seconds = 2 * (1e-9 * link_bytes + 3e-9 * num_elements)
    assert options["offload as int8"].extra_seconds == pytest.approx(seconds)


def test_what_nobody_knows_to_be_numbers_is_not_packed(slow_disk: Trace) -> None:
    """As of traces written before dtypes were recorded."""
    step = steady_step(slow_disk)
    old = msgspec.structs.replace(
        step, storages=tuple(msgspec.structs.replace(storage, dtype="") for storage in step.storages)
    )
    model = StepModel(old, slow_disk.names, find_blocks(slow_disk, old))
    costs = Costs(copy_seconds_per_byte=0.0, min_bytes=MIB, link=LINK, pack_seconds_per_element=0.0)
    names = {option.name for menu in build_menus(slow_disk, model, costs) for option in menu.options}
    assert "offload" in names
    assert not any(name.endswith("int8") for name in names)


def test_why_nothing_is_packed(slow_disk: Trace, without_disk: Callable[[Trace], Trace]) -> None:
    assert TECHNIQUE.why_not(slow_disk, ALLOWED) is None
    assert "allow it with --allow low-bit-offload" in (TECHNIQUE.why_not(slow_disk, ("precision", "kernels")) or "")
    assert "--disk DIR" in (TECHNIQUE.why_not(without_disk(slow_disk), ALLOWED) or "")
    unknown = on_machine(slow_disk, pack_seconds_per_element=0.0)
    assert "what packing costs on its machine is not in the trace" in (TECHNIQUE.why_not(unknown, ALLOWED) or "")
    on_gpu = msgspec.structs.replace(slow_disk, device="cuda")
    assert TECHNIQUE.why_not(on_gpu, ALLOWED) is None
    unknown = on_machine(on_gpu, pack_seconds_per_element=0.0)
    assert "no data sheet says what packing costs on the card" in (TECHNIQUE.why_not(unknown, ALLOWED) or "")


def test_for_a_card_that_is_not_here_packing_is_priced_by_its_bandwidth(slow_disk: Trace) -> None:
    card = hardware_named("a100-80gb")
    machine = translated(slow_disk, card, host_bytes=1 << 40).machine
    assert machine.pack_seconds_per_element == 10 / card.memory_bytes_per_second
