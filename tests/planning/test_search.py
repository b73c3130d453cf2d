"""The search: the cheapest plan whose forecast fits, or by how much none does.

The traces are of small models, their bytes multiplied until tensors are as large as those worth an action. Malloc is
left out of these forecasts but for one test, so that each number can be added up by hand.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from combinations import every_value, exhaustive

from memwall.errors import InfeasibleError, TraceError, UsageError
from memwall.machine.tiers import Machine
from memwall.planning.block_problem import build_menus
from memwall.planning.blocks import find_blocks
from memwall.planning.menu import Costs
from memwall.planning.one_recording.search_at_location import SearchAtLocation
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan, plan
from memwall.planning.settings import Settings
from memwall.planning.step_under_plan import step_under_plan
from memwall.planning.techniques.autocast import Autocast
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.planning.techniques.recompute import Recompute
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.treatment import StepModel
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes, parse_size

MIB = 1 << 20

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
without_malloc = pytest.mark.usefixtures("without_malloc")


@without_malloc
def test_with_room_for_everything_nothing_is_done(
    a_trace: Callable[[str], Trace], plain_bytes: Callable[[Trace], int]
) -> None:
    trace = a_trace("gpt")
    found = plan(trace, budget=2 * plain_bytes(trace))
    assert found.actions == ()
    assert found.forecast.fits
    assert found.forecast.step_seconds == found.forecast.plain_step_seconds == step_seconds(steady_step(trace))
    assert found.forecast.peak.process_bytes == plain_bytes(trace)
    assert found.forecast.moved_bytes_per_step == 0


def test_a_trace_without_a_step_is_refused(a_trace: Callable[[str], Trace]) -> None:
    with pytest.raises(TraceError, match="the trace has no step, and a plan needs one: record one whole training step"):
        plan(msgspec.structs.replace(a_trace("gpt"), steps=()), budget="1GiB")


@without_malloc
def test_where_the_margin_does_not_fit_nearly_all_of_it_that_can_be_is_left(
    a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]]
) -> None:
    trace = a_trace("gpt")
    smallest = plan(trace, budget=budgets(trace, (0.3,))[0]).forecast
    least_bytes, margin_bytes = smallest.smallest_feasible_budget_bytes, smallest.margin_bytes
    assert least_bytes is not None
    found = plan(trace, budget=least_bytes - margin_bytes // 8).forecast
    assert not found.fits
    assert found.peak.process_bytes <= least_bytes - margin_bytes + margin_bytes // 4


@without_malloc
@pytest.mark.parametrize("name", ["gpt", "resnet", "moe"])
def test_what_is_forecast_is_the_step_that_the_actions_make(
    name: str, a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]], plain_bytes: Callable[[Trace], int]
) -> None:
    trace = a_trace(name)
    for budget_bytes in budgets(trace, (0.0, 0.3, 0.6)):
        found = plan(trace, budget=budget_bytes)
        assert found.actions
        live_bytes = live_peak_bytes(step_under_plan(trace, found), "cpu")
        window_bytes = 32 * MIB if any(isinstance(a, Offload) for a in found.actions) else 0
        assert found.forecast.peak.allocated_bytes == live_bytes
        assert found.forecast.peak.process_bytes == trace.base_bytes + live_bytes + window_bytes
        assert found.forecast.peak.process_bytes + found.forecast.margin_bytes <= budget_bytes
        assert found.forecast.plain_peak is not None
        assert found.forecast.plain_peak.process_bytes == plain_bytes(trace)


@without_malloc
@pytest.mark.parametrize(
    ("name", "has_disk"), every_value(["gpt", "resnet", "unet", "moe", "lora", "vit"], [True, False])
)
def test_the_smallest_feasible_budget_is_feasible_and_a_little_less_is_not(
    name: str,
    has_disk: bool,
    a_trace: Callable[[str], Trace],
    smallest_bytes: Callable[..., int],
    without_disk: Callable[[Trace], Trace],
) -> None:
    trace = a_trace(name) if has_disk else without_disk(a_trace(name))
    least = smallest_bytes(trace)
    found = plan(trace, budget=least)
    assert found.forecast.smallest_feasible_budget_bytes == least
    a_little_less = plan(trace, budget=int(trace.base_bytes + 0.99 * (least - trace.base_bytes))).forecast
    assert not a_little_less.fits  # inside the margin only
    assert a_little_less.budget_bytes is not None
    assert a_little_less.peak.process_bytes <= a_little_less.budget_bytes
    assert a_little_less.peak.process_bytes + a_little_less.margin_bytes > a_little_less.budget_bytes
    with pytest.raises(InfeasibleError):
        plan(trace, budget=int(trace.base_bytes + 0.8 * (least - trace.base_bytes)))


def test_the_smallest_feasible_budget_is_feasible_with_malloc_in_the_forecast(
    a_trace: Callable[[str], Trace], smallest_bytes: Callable[..., int], without_disk: Callable[[Trace], Trace]
) -> None:
    trace = without_disk(a_trace("gpt"))
    least = smallest_bytes(trace)
    found = plan(trace, budget=least)
    assert found.forecast.peak.process_bytes + found.forecast.margin_bytes <= least
    assert any(action.exactness == "bit-exact" for action in found.actions)


@without_malloc
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_a_larger_budget_never_costs_more(
    name: str, a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]]
) -> None:
    trace = a_trace(name)
    seconds = [
        plan(trace, budget=budget_bytes).forecast.step_seconds
        for budget_bytes in budgets(trace, (0.0, 0.2, 0.4, 0.6, 0.8, 1.2, 1.6))
    ]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == pytest.approx(step_seconds(steady_step(trace)))
    assert seconds[0] > 1.01 * seconds[-1]


@without_malloc
def test_no_hand_set_knob_that_fits_is_cheaper(
    a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]], without_disk: Callable[[Trace], Trace]
) -> None:
    trace = without_disk(a_trace("gpt"))
    step = steady_step(trace)
    model = StepModel(step, trace.names, find_blocks(trace, step))
    menus = build_menus(trace, model, Costs(copy_seconds_per_byte=0.0, min_bytes=MIB))
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
            if trace.base_bytes + live_peak_bytes(treated, "cpu") <= limit_bytes:
                compared += 1
                # Recomputation alone: what the executor itself costs comes on top of both.
                assert step_seconds(treated) >= found.forecast.step_seconds - 300e-6 * 5 - 20e-6 * len(step.ops)
        assert compared


@without_malloc
def test_without_a_disk_nothing_moves(
    a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]], without_disk: Callable[[Trace], Trace]
) -> None:
    trace = without_disk(a_trace("gpt"))
    for budget_bytes in budgets(trace, (0.0, 0.5)):
        found = plan(trace, budget=budget_bytes)
        assert not any(isinstance(action, Offload) for action in found.actions)
        assert found.forecast.moved_bytes_per_step == 0


@without_malloc
def test_a_full_disk_is_not_used_beyond_its_room(
    a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]], fast_disk: Machine
) -> None:
    trace = msgspec.structs.replace(a_trace("gpt"), machine=fast_disk)
    (budget_bytes,) = budgets(trace, (0.6,))
    free = plan(trace, budget=budget_bytes).forecast
    assert free.moved_bytes_per_step > 0
    room_bytes = free.moved_bytes_per_step // 2
    tight = plan(trace, budget=budget_bytes, tier_capacity_bytes=room_bytes).forecast
    assert tight.moved_bytes_per_step <= room_bytes
    assert tight.step_seconds is not None
    assert free.step_seconds is not None
    assert tight.step_seconds >= free.step_seconds


@without_malloc
def test_a_disk_that_was_not_measured_is_an_error(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    with pytest.raises(UsageError) as error:
        plan(trace, budget=1 << 40, disk="/elsewhere")
    assert str(error.value) == (
        "disk='/elsewhere': the trace knows the speed of /scratch; measure this one with "
        "`memwall plan TRACE --disk DIR`"
    )
    assert plan(trace, budget=1 << 40, disk="/scratch").actions == ()


@without_malloc
def test_every_action_says_what_it_frees_and_costs(
    a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]]
) -> None:
    trace = a_trace("gpt")
    (budget_bytes,) = budgets(trace, (0.2,))
    found = plan(trace, budget=budget_bytes)
    recompute = [a for a in found.actions if isinstance(a, Recompute)]
    offload = [a for a in found.actions if isinstance(a, Offload)]
    placement = [a for a in found.actions if isinstance(a, OptimizerPlacement)]
    assert found.actions == (*placement, *recompute, *offload)
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
@pytest.mark.parametrize("name", ["gpt", exhaustive("resnet"), exhaustive("moe")])
def test_planning_twice_gives_the_same_bytes(
    name: str, a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]]
) -> None:
    trace = a_trace(name)
    for budget_bytes in budgets(trace, (0.1, 0.5)):
        assert plan(trace, budget=budget_bytes).encode() == plan(trace, budget=budget_bytes).encode()


@without_malloc
@pytest.mark.parametrize("name", [exhaustive("gpt"), exhaustive("moe"), "vit"])
def test_what_cannot_be_cheaper_is_not_replayed_which_changes_no_plan(
    name: str, a_trace: Callable[[str], Trace], budgets: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN that the batch may be split WHEN candidates are tried to their end THEN that finds the same, with more."""
    trace = a_trace(name)
    samples = trace.micro_batch * trace.num_micro_batches
    replay, solve_for = SearchAtLocation._resident, SearchAtLocation._solve_for
    num_replays = 0

    def counted(search: Any, *args: Any, **options: Any) -> Any:
        nonlocal num_replays
        num_replays += 1
        return replay(search, *args, **options)

    def planned() -> tuple[list[bytes], int]:
        nonlocal num_replays
        num_replays = 0
        shares = budgets(trace, (0.1, 0.4, 0.7))
        return [plan(trace, budget=share, global_batch=samples).encode() for share in shares], num_replays

    monkeypatch.setattr(SearchAtLocation, "_resident", counted)
    plans, few = planned()
    monkeypatch.setattr(
        SearchAtLocation,
        "_solve_for",
        lambda search, *args: solve_for(search, *args[:-1], math.inf),
    )
    exhaustive, many = planned()
    assert plans == exhaustive
    assert few < many


def test_an_infeasible_budget_says_by_how_much_and_what_would_help(
    a_trace: Callable[[str], Trace], without_disk: Callable[[Trace], Trace]
) -> None:
    trace = without_disk(a_trace("gpt"))
    budget_bytes = 200 * MIB
    with pytest.raises(InfeasibleError) as error:
        plan(trace, budget=budget_bytes)
    least = error.value.smallest_feasible_bytes
    parameter_bytes = sum(s.nbytes for s in steady_step(trace).storages if s.category == "parameter")
    assert (error.value.exit_status, error.value.budget_bytes) == (3, budget_bytes)
    assert str(error.value) == (
        f"the budget of 200.0 MiB cannot be met: the smallest feasible one is {format_bytes(least, rounding='up')}, "
        f"{format_bytes(least - budget_bytes, rounding='up')} more\n"
        f"of that, 100.0 MiB are the process before the step, {parameter_bytes / MIB:.1f} MiB parameters "
        "(largest: tokens)\n"
        "  - give a disk for saved tensors: --disk DIR\n"
        "  - halve the micro-batch and accumulate: batch size 4 to 2, 2 accumulation steps (the same global batch)\n"
        "  - allow fused kernels for RMSNorms, gated MLPs and the loss of a language model: --allow kernels\n"
        "  - allow bfloat16 autocast, which changes numerics: --allow precision\n"
        "  - step within backward, for a loop whose steps are all alike: --allow gradient-release\n"
        "  - shorten the sequence or lower the resolution"
    )
    assert error.value.relaxations == tuple(line[4:] for line in str(error.value).splitlines()[2:])
    # Typed as it is shown, it is enough.
    assert plan(trace, budget=parse_size(format_bytes(least, rounding="up"))).forecast.fits


@without_malloc
def test_what_was_allowed_already_is_not_offered_again(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    with pytest.raises(InfeasibleError) as error:
        plan(trace, budget=110 * MIB, allow=("precision", "kernels", "gradient-release"), global_batch=4)
    assert error.value.relaxations == ("shorten the sequence or lower the resolution",)


def test_a_plan_for_a_lower_precision_says_so_first(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    found = make_plan(
        trace, Settings(budget_bytes=1 << 40, allow=("precision",), standing=(Autocast(dtype="bfloat16"),))
    )
    assert found.actions == (Autocast(dtype="bfloat16"),)
    assert found.actions[0].exactness == "changes-numerics"
    assert isinstance(found, Plan)
