"""The search: the cheapest plan whose forecast fits, or by how much none does.

The traces are of small models, their bytes multiplied until tensors are as large as those worth an action. Malloc is
left out of these forecasts but for one test, so that each number can be added up by hand.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from zoo import MODELS, Case, trained_parameters

from memwall.errors import InfeasibleError, UsageError
from memwall.plan.actions import Accumulate, Autocast, Offload, Recompute
from memwall.plan.blocks import find_blocks
from memwall.plan.menu import Costs, build_menus
from memwall.plan.microbatch import candidate_micro_batches, with_micro_batch
from memwall.plan.planfile import Plan
from memwall.plan.planned import planned_step
from memwall.plan.search import Settings, make_plan, plan
from memwall.predict import process
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.treatment import StepModel, Treatment
from memwall.trace.build import steady_step
from memwall.trace.record import TraceBuilder, record
from memwall.trace.records import Machine, Step, Trace
from memwall.trace.workload import Workload

MIB = 1 << 20
BASE_BYTES = 100 * MIB
FACTOR = 400
DISK = Machine(
    disk="/scratch",
    disk_write_bytes_per_second=1e9,
    disk_read_bytes_per_second=1e9,
    disk_free_bytes=1 << 40,
    copy_seconds_per_byte=2e-10,
)
FAST_DISK = Machine(
    disk="/scratch",
    disk_write_bytes_per_second=1e12,
    disk_read_bytes_per_second=1e12,
    disk_free_bytes=1 << 40,
    copy_seconds_per_byte=1e-12,
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def _no_malloc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is its base and its tensors."""
    monkeypatch.setattr(process, "unavailable_reason", lambda: "left out of this test")
    monkeypatch.setattr(process, "heap_unavailable_reason", lambda: "left out of this test")


without_malloc = pytest.mark.usefixtures("_no_malloc")


def magnified(step: Step) -> Step:
    """The step with every byte FACTOR times, and times that follow from bytes and FLOPs."""
    storages = tuple(msgspec.structs.replace(s, nbytes=s.nbytes * FACTOR) for s in step.storages)
    saved = tuple(msgspec.structs.replace(s, nbytes=s.nbytes * FACTOR) for s in step.saved)
    ops = tuple(
        msgspec.structs.replace(
            op, seconds=1e-5 + 5e-9 * op.flops + 2e-10 * sum(storages[i].nbytes for i in op.outputs)
        )
        for op in step.ops
    )
    return msgspec.structs.replace(step, storages=storages, saved=saved, ops=ops, process_peak_bytes=0)


def magnified_trace(case: Case, machine: Machine = DISK) -> Trace:
    optimizer = torch.optim.AdamW(trained_parameters(case.model), lr=1e-3)
    builder = TraceBuilder([case.model])
    for _ in range(2):
        builder.start_step(optimizer)
        case.loss(case.model, case.batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        builder.finish_step(optimizer)
    trace = builder.trace(optimizer, machine=machine)
    return msgspec.structs.replace(trace, base_bytes=BASE_BYTES, steps=tuple(magnified(step) for step in trace.steps))


@cache
def a_trace(name: str) -> Trace:
    return magnified_trace(MODELS[name]("tiny"))


def plain_bytes(trace: Trace) -> int:
    return trace.base_bytes + live_peak_bytes(steady_step(trace), "cpu")


def smallest_bytes(trace: Trace, **settings: Any) -> int:
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=BASE_BYTES, **settings))
    return error.value.smallest_feasible_bytes


def budgets(trace: Trace, shares: Sequence[float], **settings: Any) -> list[int]:
    """Between the smallest feasible budget (0.0) and what the plain run takes (1.0)."""
    least = smallest_bytes(trace, **settings)
    return [int(least + (plain_bytes(trace) - least) * share) for share in shares]


def without_disk(trace: Trace) -> Trace:
    return msgspec.structs.replace(trace, machine=Machine())


@without_malloc
def test_with_room_for_everything_nothing_is_done() -> None:
    trace = a_trace("gpt")
    found = plan(trace, budget=2 * plain_bytes(trace))
    assert found.actions == ()
    assert found.forecast.fits
    assert found.forecast.step_seconds == found.forecast.plain_step_seconds == step_seconds(steady_step(trace))
    assert found.forecast.peak.process_bytes == plain_bytes(trace)
    assert found.forecast.moved_bytes_per_step == 0


@without_malloc
@pytest.mark.parametrize("name", ["gpt", "resnet", "moe"])
def test_what_is_forecast_is_the_step_that_the_actions_make(name: str) -> None:
    trace = a_trace(name)
    for budget_bytes in budgets(trace, (0.0, 0.3, 0.6)):
        found = plan(trace, budget=budget_bytes)
        assert found.actions
        live_bytes = live_peak_bytes(planned_step(trace, found), "cpu")
        window_bytes = 32 * MIB if any(isinstance(a, Offload) for a in found.actions) else 0
        assert found.forecast.peak.allocated_bytes == live_bytes
        assert found.forecast.peak.process_bytes == BASE_BYTES + live_bytes + window_bytes
        assert found.forecast.peak.process_bytes + found.forecast.margin_bytes <= budget_bytes
        assert found.forecast.plain_peak is not None
        assert found.forecast.plain_peak.process_bytes == plain_bytes(trace)


@without_malloc
@pytest.mark.parametrize("has_disk", [True, False])
@pytest.mark.parametrize("name", ["gpt", "resnet", "unet", "moe", "lora", "vit"])
def test_the_smallest_feasible_budget_is_feasible_and_a_little_less_is_not(name: str, has_disk: bool) -> None:
    trace = a_trace(name) if has_disk else without_disk(a_trace(name))
    least = smallest_bytes(trace)
    found = plan(trace, budget=least)
    assert found.forecast.smallest_feasible_budget_bytes == least
    a_little_less = plan(trace, budget=int(BASE_BYTES + 0.99 * (least - BASE_BYTES))).forecast
    assert not a_little_less.fits  # inside the margin only
    assert a_little_less.budget_bytes is not None
    assert a_little_less.peak.process_bytes <= a_little_less.budget_bytes
    assert a_little_less.peak.process_bytes + a_little_less.margin_bytes > a_little_less.budget_bytes
    with pytest.raises(InfeasibleError):
        plan(trace, budget=int(BASE_BYTES + 0.8 * (least - BASE_BYTES)))


def test_the_smallest_feasible_budget_is_feasible_with_malloc_in_the_forecast() -> None:
    trace = without_disk(a_trace("gpt"))
    least = smallest_bytes(trace)
    found = plan(trace, budget=least)
    assert found.forecast.peak.process_bytes + found.forecast.margin_bytes <= least
    assert any(action.exactness == "bit-exact" for action in found.actions)


@without_malloc
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_larger_budget_never_costs_more(name: str) -> None:
    trace = a_trace(name)
    seconds = [
        plan(trace, budget=budget_bytes).forecast.step_seconds
        for budget_bytes in budgets(trace, (0.0, 0.2, 0.4, 0.6, 0.8, 1.2, 1.6))
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(step_seconds(steady_step(trace)))
    assert seconds[0] > 1.01 * seconds[-1]


@without_malloc
def test_no_hand_set_knob_that_fits_is_cheaper() -> None:
    trace = without_disk(a_trace("gpt"))
    step = steady_step(trace)
    model = StepModel(step, trace.names, find_blocks(trace, step))
    menus = build_menus(trace, model, Costs(copy_seconds_per_byte=0.0, min_bytes=MIB, can_offload=False))
    rng = random.Random(0)
    knobs: list[dict[str, Treatment]] = []
    for _ in range(400):
        chosen = [rng.randrange(len(menu.options)) for menu in menus]
        knobs.append(
            {
                menu.block.path: treatment
                for menu, option in zip(menus, chosen, strict=True)
                if (treatment := menu.treatments[option]) is not None
            }
        )
    for budget_bytes in budgets(trace, (0.1, 0.5)):
        found = plan(trace, budget=budget_bytes)
        assert found.forecast.step_seconds is not None
        limit_bytes = budget_bytes - found.forecast.margin_bytes
        compared = 0
        for knob in knobs:
            treated = model.treated(knob)
            if BASE_BYTES + live_peak_bytes(treated, "cpu") <= limit_bytes:
                compared += 1
                # Recomputation alone: what the executor itself costs comes on top of both.
                assert step_seconds(treated) >= found.forecast.step_seconds - 300e-6 * 5 - 20e-6 * len(step.ops)
        assert compared


@without_malloc
def test_without_a_disk_nothing_moves() -> None:
    trace = without_disk(a_trace("gpt"))
    for budget_bytes in budgets(trace, (0.0, 0.5)):
        found = plan(trace, budget=budget_bytes)
        assert not any(isinstance(action, Offload) for action in found.actions)
        assert found.forecast.moved_bytes_per_step == 0


@without_malloc
def test_a_full_disk_is_not_used_beyond_its_room() -> None:
    trace = msgspec.structs.replace(a_trace("gpt"), machine=FAST_DISK)
    (budget_bytes,) = budgets(trace, (0.3,))
    free = plan(trace, budget=budget_bytes).forecast
    assert free.moved_bytes_per_step > 0
    room_bytes = free.moved_bytes_per_step // 2
    tight = plan(trace, budget=budget_bytes, disk_capacity_bytes=room_bytes).forecast
    assert tight.moved_bytes_per_step <= room_bytes
    assert tight.step_seconds is not None
    assert free.step_seconds is not None
    assert tight.step_seconds >= free.step_seconds


@without_malloc
def test_a_disk_that_was_not_measured_is_an_error() -> None:
    trace = a_trace("gpt")
    with pytest.raises(UsageError) as error:
        plan(trace, budget=1 << 40, disk="/elsewhere")
    assert str(error.value) == (
        "disk='/elsewhere': the trace knows the speed of /scratch; measure this one with "
        "`memwall plan TRACE --disk DIR`"
    )
    assert plan(trace, budget=1 << 40, disk="/scratch").actions == ()


@without_malloc
def test_every_action_says_what_it_frees_and_costs() -> None:
    trace = a_trace("gpt")
    (budget_bytes,) = budgets(trace, (0.2,))
    found = plan(trace, budget=budget_bytes)
    recompute = [a for a in found.actions if isinstance(a, Recompute)]
    offload = [a for a in found.actions if isinstance(a, Offload)]
    assert found.actions == (*recompute, *offload)
    for action in found.actions:
        assert action.exactness == "bit-exact"
        assert action.saved_bytes is not None
        assert action.saved_bytes > MIB
        assert action.cost_seconds is not None
    blocks = [block.path for block in find_blocks(trace, steady_step(trace))]
    for same in (recompute, offload):
        assert [a.block for a in same] == [path for path in blocks if path in {a.block for a in same}]
    for action in recompute:
        assert len(action.kept_names) == len(action.kept_ops) < action.num_ops
    assert found.forecast.binding[0].startswith("memory at ")


@without_malloc
@pytest.mark.parametrize("name", ["gpt", "resnet", "moe"])
def test_planning_twice_gives_the_same_bytes(name: str) -> None:
    trace = a_trace(name)
    for budget_bytes in budgets(trace, (0.1, 0.5)):
        assert plan(trace, budget=budget_bytes).encode() == plan(trace, budget=budget_bytes).encode()


@without_malloc
def test_an_infeasible_budget_says_by_how_much_and_what_would_help() -> None:
    trace = without_disk(a_trace("gpt"))
    budget_bytes = 200 * MIB
    with pytest.raises(InfeasibleError) as error:
        plan(trace, budget=budget_bytes)
    least = error.value.smallest_feasible_bytes
    parameter_bytes = sum(s.nbytes for s in steady_step(trace).storages if s.category == "parameter")
    assert (error.value.exit_status, error.value.budget_bytes) == (3, budget_bytes)
    assert str(error.value) == (
        f"the budget of 200.0 MiB cannot be met: the smallest feasible one is {least / MIB:.1f} MiB, "
        f"{(least - budget_bytes) / MIB:.1f} MiB more\n"
        f"of that, 100.0 MiB are the process before the step, {parameter_bytes / MIB:.1f} MiB parameters "
        "(largest: tokens)\n"
        "  - give a disk for saved tensors: --disk DIR\n"
        "  - halve the micro-batch and accumulate: batch size 2, 2 accumulation steps (the same global batch)\n"
        "  - allow bfloat16 autocast, which changes numerics: --allow precision\n"
        "  - shorten the sequence or lower the resolution"
    )
    assert error.value.relaxations == tuple(line[4:] for line in str(error.value).splitlines()[2:])


@without_malloc
def test_what_was_allowed_already_is_not_offered_again() -> None:
    trace = a_trace("gpt")
    with pytest.raises(InfeasibleError) as error:
        plan(trace, budget=110 * MIB, allow=("precision",), global_batch=4)
    assert error.value.relaxations == ("shorten the sequence or lower the resolution",)


# -- micro-batches -----------------------------------------------------------------------------------------------------


@without_malloc
def test_the_batch_is_split_only_if_the_loop_said_its_global_batch() -> None:
    trace = without_disk(a_trace("gpt"))
    (budget_bytes,) = budgets(trace, (0.0,))
    assert not any(isinstance(action, Accumulate) for action in plan(trace, budget=budget_bytes).actions)
    less = budget_bytes - 40 * MIB
    found = plan(trace, budget=less, global_batch=4)
    (split,) = [action for action in found.actions if isinstance(action, Accumulate)]
    assert split.micro_batch * split.num_micro_batches == 4
    assert split.exactness == "equivalent"
    assert found.actions[0] == split


@without_malloc
def test_another_global_batch_than_the_traces_is_an_error() -> None:
    with pytest.raises(UsageError) as error:
        plan(a_trace("gpt"), budget="1TiB", global_batch=8)
    assert str(error.value) == (
        "the trace ran 4 samples per optimizer step, asked for is a global batch of 8; record a trace with that batch"
    )


@without_malloc
def test_a_batch_with_batch_norm_is_never_split() -> None:
    trace = a_trace("resnet")
    assert smallest_bytes(trace, allow_accumulation=True) == smallest_bytes(trace)


def test_micro_batches_are_divisors_so_that_all_are_equal() -> None:
    trace = a_trace("gpt")
    assert candidate_micro_batches(trace) == (4, 2, 1)
    assert candidate_micro_batches(msgspec.structs.replace(trace, micro_batch=12)) == (12, 6, 4, 3, 2, 1)


def test_half_the_batch_is_predicted_as_it_runs() -> None:
    """GIVEN a step of four samples WHEN it is halved THEN its peak is that of a recorded accumulation of two."""
    whole = MODELS["gpt"]("tiny")
    trace = magnified_trace(whole)

    def two_halves(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        whole.loss(model, {name: value[:2] for name, value in batch.items()}).backward()
        return whole.loss(model, {name: value[2:] for name, value in batch.items()})

    halved = magnified_trace(Case(whole.model, whole.batch, two_halves))
    assert halved.num_micro_batches == 2
    predicted = live_peak_bytes(with_micro_batch(trace, steady_step(trace), 2), "cpu")
    # The whole batch is held by the loop in both.
    assert predicted == pytest.approx(live_peak_bytes(steady_step(halved), "cpu"), rel=0.02)


@without_malloc
def test_what_is_moved_in_parts_is_moved_as_often_as_there_are_parts() -> None:
    """A step of four parts sends the same bytes to disk as an undivided one, a quarter at a time."""
    trace = a_trace("gpt")
    step = with_micro_batch(trace, steady_step(trace), 1)
    model = StepModel(step, trace.names, find_blocks(trace, step))
    prices = []
    for num_passes in (1, 4):
        costs = Costs(copy_seconds_per_byte=1e-9, min_bytes=MIB, can_offload=True, num_passes=num_passes)
        menu = build_menus(trace, model, costs)[0]
        prices.append({option.name: option for option in menu.options})
    assert prices[1]["offload"].moved_bytes == prices[0]["offload"].moved_bytes
    assert prices[1]["offload"].extra_seconds == pytest.approx(4 * prices[0]["offload"].extra_seconds)
    # Recomputed are the same operations; only the checkpoints are four.
    recomputed = [price["full"].extra_seconds for price in prices]
    assert 0 < recomputed[1] - recomputed[0] < 0.25 * recomputed[0]

    trace = msgspec.structs.replace(trace, machine=FAST_DISK)
    least = smallest_bytes(trace, allow_accumulation=True)
    found = plan(trace, budget=least + 64 * MIB, global_batch=4)
    (split,) = [action for action in found.actions if isinstance(action, Accumulate)]
    moved = found.forecast.moved_bytes_per_step
    assert moved > 0
    assert found.forecast.peak.disk_bytes == moved // split.num_micro_batches


# -- what must not be recomputed ---------------------------------------------------------------------------------------


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


def menu_names(layer: Callable[[int], nn.Module]) -> list[set[str]]:
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
    costs = Costs(copy_seconds_per_byte=0.0, min_bytes=1024, can_offload=True)
    menus = build_menus(trace, StepModel(step, trace.names, blocks), costs)
    assert len(menus) == 3
    return [{option.name for option in menu.options} for menu in menus]


@pytest.mark.parametrize("layer", [Stateful, InPlaceFirst])
def test_what_a_second_run_would_change_is_offered_for_moving_only(layer: Callable[[int], nn.Module]) -> None:
    assert menu_names(layer) == [{"keep", "offload"}] * 3


def test_batch_norm_is_offered_since_the_executor_spares_its_statistics() -> None:
    assert all({"keep", "full", "offload"} <= names for names in menu_names(Normed))


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
    costs = Costs(copy_seconds_per_byte=0.0, min_bytes=1024, can_offload=False)
    for menu in build_menus(trace, model, costs):
        kept = {number for treatment in menu.treatments if treatment for number in treatment.kept_ops}
        drawn = [number for number, name in enumerate(menu.op_names) if name == "aten.rand_like.default"]
        assert len(drawn) == 2
        assert drawn[0] not in kept
        assert drawn[1] in kept


def test_a_plan_for_a_lower_precision_says_so_first() -> None:
    trace = a_trace("gpt")
    found = make_plan(trace, Settings(budget_bytes=1 << 40, allow=("precision",), autocast="bfloat16"))
    assert found.actions == (Autocast(dtype="bfloat16"),)
    assert found.actions[0].exactness == "changes-numerics"
    assert isinstance(found, Plan)
