"""State read while backward runs, as the planner sees it: what there is room for, what it saves, where it is legal."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import on_machine

from memwall.planning import located_search as placed_search
from memwall.planning.actions import OptimizerPlacement, ParameterPlacement, StateAhead
from memwall.planning.locations import Place
from memwall.planning.placement import optimizer_placements, placed, with_state_ahead
from memwall.planning.planfile import Plan
from memwall.planning.planned_step import planned_step
from memwall.planning.read_ahead import may_read_ahead, state_ahead
from memwall.planning.search import Settings, plan
from memwall.planning.search_inputs import Problem
from memwall.predict.curve import live_curve, live_peak_bytes
from memwall.predict.state_on_disk import begun_early, bytes_read_early, state_sizes
from memwall.report.plan_grids import action_grid
from memwall.trace.build import steady_step
from memwall.trace.records import Op, Step, Storage, Trace
from memwall.units import format_bytes

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


# What there is room for.


def a_step(activations_mib: Sequence[int], *, state_mib: int) -> Step:
    """Backward frees one activation and makes one gradient of a MiB with each operation; then the optimizer runs."""
    num = len(activations_mib)
    phases = ["forward"] * num + ["backward"] * num + ["optimizer"] * 2
    ops = tuple(Op(0, 0, phase, 1.0, 0, (), (), ()) for phase in phases)

    def storage(mib: int, category: str, birth: int, death: int) -> Storage:
        return Storage(mib * MIB, "cpu", category, birth, death, death, 0, "forward", False)

    saved = [storage(mib, "activation", k, 2 * num - k) for k, mib in enumerate(activations_mib)]
    gradients = [storage(1, "gradient", num + k, len(ops)) for k in range(num)]
    state = [storage(1, "optimizer_state", -1, len(ops)) for _ in range(state_mib)]
    return Step(
        kind="steady",
        ops=ops,
        storages=(*saved, *gradients, *state),
        saved=(),
        calls=(),
        marks=(),
        wall_seconds=float(len(ops)),
        process_peak_bytes=0,
    )


def placement(bucket_mib: int, state_mib: int) -> OptimizerPlacement:
    return OptimizerPlacement(
        tier="disk", resident_bytes=0, bucket_bytes=bucket_mib * MIB, min_bytes=1, saved_bytes=state_mib * MIB
    )


def allowed_for(step: Step, state: OptimizerPlacement, share: float = 1.0) -> tuple[StateAhead, ...]:
    return state_ahead(placed(step, state), state_sizes(step, 1), "cpu", state, share=share)


def test_each_freed_activation_makes_room_that_is_used_from_the_next_gradient_on() -> None:
    step, state = a_step([16] * 8, state_mib=64), placement(1, 64)
    found = [(one.after_gradients, one.buffer_bytes // MIB) for one in allowed_for(step, state)]
    # An activation of 16 goes with each operation, and a gradient comes: beyond the first 15 more are free each time.
    assert found == [(2, 8), (3, 24), (4, 40), (5, 56), (6, 64)]


@settings(max_examples=60, deadline=None)
@given(
    activations=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    state_mib=st.integers(1, 60),
    bucket_mib=st.integers(1, 8),
    share=st.sampled_from([1.0, 0.75, 0.5]),
)
def test_the_peak_stays_what_it_is_and_no_more_is_allowed_than_there_is_state(
    activations: list[int], state_mib: int, bucket_mib: int, share: float
) -> None:
    step, state = a_step(activations, state_mib=state_mib), placement(bucket_mib, state_mib)
    found = allowed_for(step, state, share)
    early = placed(step, msgspec.structs.replace(state, ahead=found))  # its figures grow, or it is refused
    pages = 4096 * len(early.storages)
    assert live_peak_bytes(early, "cpu") <= live_peak_bytes(placed(step, state), "cpu") + pages
    assert max((one.buffer_bytes for one in found), default=0) <= state_mib * MIB


def test_more_state_than_room_is_read_as_far_as_the_peak_reaches() -> None:
    step, state = a_step([10] * 6, state_mib=60), placement(1, 60)
    early = placed(step, msgspec.structs.replace(state, ahead=allowed_for(step, state)))
    last_of_backward = int(live_curve(early.storages, len(early.ops))[11])
    assert last_of_backward == pytest.approx(live_peak_bytes(placed(step, state), "cpu"), abs=MIB)


def test_without_gradients_or_an_optimizer_there_is_nothing_to_wait_for() -> None:
    step, state = a_step([16] * 4, state_mib=8), placement(1, 8)
    standing = tuple(msgspec.structs.replace(s, birth=-1) if s.category == "gradient" else s for s in step.storages)
    ops = tuple(op for op in step.ops if op.phase != "optimizer")
    assert allowed_for(msgspec.structs.replace(step, storages=standing), state) == ()
    assert allowed_for(msgspec.structs.replace(step, ops=ops), state) == ()


# What it saves.


@pytest.mark.parametrize(
    ("figures", "mib_per_second", "expected_mib"),
    [
        ([(1, 30)], 4.0, 16),  # four seconds of backward are left
        ([(1, 30)], 10.0, 30),
        ([(1, 4), (4, 30)], 4.0, 8),  # it waits for the room
        ([(1, 6), (2, 30)], 4.0, 16),  # the first is still being read
        ([], 4.0, 0),
    ],
)
def test_what_is_there_when_the_optimizer_begins(
    figures: list[tuple[int, int]], mib_per_second: float, expected_mib: int
) -> None:
    """GIVEN buckets of a MiB."""
    step = a_step([1] * 4, state_mib=64)
    assert early_mib(step, [MIB] * 64, figures, 1, mib_per_second) == expected_mib


@pytest.mark.parametrize(
    ("sizes_mib", "figures", "expected_mib"),
    [
        ([8, 8, 8], [(1, 20)], 16),  # no part of a bucket
        ([8, 8, 8], [(1, 7)], 0),
        ([24, 8, 8, 8], [(1, 24), (2, 32)], 32),  # the large one first
        ([24, 8, 8, 8], [(1, 8), (3, 32)], 32),  # which another one passes
        ([24, 8, 8, 8], [(1, 16), (3, 32)], 32),  # and only one
        ([24, 8, 8, 8], [(1, 16), (3, 23)], 16),  # for which there is no room ever
    ],
)
def test_whole_buckets_are_read(sizes_mib: list[int], figures: list[tuple[int, int]], expected_mib: int) -> None:
    step = a_step([1] * 4, state_mib=64)
    assert early_mib(step, [mib * MIB for mib in sizes_mib], figures, 8, 1000.0) == expected_mib


def early_mib(
    step: Step, sizes: list[int], figures: list[tuple[int, int]], bucket_mib: int, mib_per_second: float
) -> float:
    num_bytes = bytes_read_early(
        step,
        sizes,
        [(count, mib * MIB) for count, mib in figures],
        away_bytes=sum(sizes),
        bucket_bytes=bucket_mib * MIB,
        read_bytes_per_second=mib_per_second * MIB,
    )
    return num_bytes / MIB


@settings(max_examples=200, deadline=None)
@given(
    large=st.lists(st.integers(5, 30), max_size=4),
    num_small=st.integers(0, 8),
    steps=st.lists(st.integers(1, 20), min_size=1, max_size=5),
)
def test_no_more_is_begun_than_is_allowed_and_large_ones_that_fit_are_before_the_end(
    large: list[int], num_small: int, steps: list[int]
) -> None:
    waiting, held_bytes, begun_sizes = [*large, *[4] * num_small], 0, []
    allowed = list(accumulate(steps))
    for allowed_bytes in allowed:
        begun = begun_early(
            waiting, ring_bytes=4, allowed_bytes=allowed_bytes, most_bytes=allowed[-1], held_bytes=held_bytes
        )
        begun_sizes += [waiting[number] for number in begun]
        waiting = [size for number, size in enumerate(waiting) if number not in begun]
        held_bytes = sum(begun_sizes)
        assert held_bytes <= allowed_bytes
    # By the end it is as if all had been allowed at once.
    at_once = begun_early(
        [*large, *[4] * num_small], ring_bytes=4, allowed_bytes=allowed[-1], most_bytes=allowed[-1], held_bytes=0
    )
    assert sorted(begun_sizes) == sorted([*large, *[4] * num_small][number] for number in at_once)


def test_what_was_read_is_off_the_disk_s_time(a_trace: Callable[[str], Trace]) -> None:
    trace = on_machine(a_trace("gpt"), disk_read_bytes_per_second=1e8, disk_write_bytes_per_second=1e8)
    step = steady_step(trace)
    state = optimizer_placements(trace, step, capacity_bytes=1 << 40)[0]
    read_bytes = (state.saved_bytes or 0) // 2
    ahead = (StateAhead(after_gradients=1, buffer_bytes=state.saved_bytes or 0),)
    earlier = with_state_ahead(trace, step, state, ahead, read_bytes)
    assert earlier.steps_ahead == ahead
    assert (state.cost_seconds or 0) - (earlier.cost_seconds or 0) == pytest.approx(read_bytes / 1e8, rel=0.02)
    assert with_state_ahead(trace, step, state, (), 0).cost_seconds == state.cost_seconds


# In plans.


def state_of(found: Plan) -> OptimizerPlacement:
    (action,) = [action for action in found.actions if isinstance(action, OptimizerPlacement)]
    return action


@pytest.fixture
def trace_of(a_trace: Callable[[str], Trace], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Trace]:
    """A trace with a disk to which state may go, and no saved tensors."""
    monkeypatch.setattr(placed_search, "can_offload", lambda *_: "there is no such thing")
    return lambda name: on_machine(a_trace(name), disk_read_bytes_per_second=2e9, disk_write_bytes_per_second=2e9)


@pytest.mark.parametrize("name", ["gpt", "vit", "resnet"])
def test_a_plan_reads_ahead_and_its_forecast_says_what_that_holds(
    name: str,
    trace_of: Callable[[str], Trace],
    smallest_bytes: Callable[..., int],
    plain_bytes: Callable[[Trace], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = trace_of(name)
    budget_bytes = int(0.7 * smallest_bytes(trace) + 0.3 * plain_bytes(trace))
    found = plan(trace, budget=budget_bytes)
    monkeypatch.setattr(placed_search, "may_read_ahead", lambda *_: False)
    without = plan(trace, budget=budget_bytes)
    allowed = state_of(found).steps_ahead
    assert allowed
    assert found.forecast.peak.process_bytes + found.forecast.margin_bytes <= budget_bytes
    assert (found.forecast.step_seconds or 0) < (without.forecast.step_seconds or 0)
    assert found.forecast.peak.allocated_bytes == live_peak_bytes(planned_step(trace, found), "cpu")
    (row,) = [row for row in action_grid(found.actions).rows if row[0] == "optimizer state to disk"]
    assert row[1].endswith(f"; up to {format_bytes(allowed[-1].buffer_bytes)} read in backward")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Plan) == found


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: msgspec.structs.replace(t, num_micro_batches=2), "of two backwards the last one is meant"),
        (lambda t: on_machine(t, disk_read_bytes_per_second=1e16, disk_write_bytes_per_second=2e9), "it saves nothing"),
    ],
    ids=["accumulation", "no gain"],
)
def test_nothing_is_read_ahead_where_that_is_not_legal_or_saves_nothing(
    change: Callable[[Trace], Trace],
    why: str,
    trace_of: Callable[[str], Trace],
    smallest_bytes: Callable[..., int],
    plain_bytes: Callable[[Trace], int],
) -> None:
    trace = change(trace_of("vit"))
    budget_bytes = int(0.7 * smallest_bytes(trace) + 0.3 * plain_bytes(trace))
    found = [action for action in plan(trace, budget=budget_bytes).actions if isinstance(action, OptimizerPlacement)]
    assert all(action.steps_ahead == () for action in found), why


def test_nothing_is_where_the_disk_is_busy_in_backward_or_there_are_several(
    trace_of: Callable[[str], Trace], plain_bytes: Callable[[Trace], int]
) -> None:
    trace = trace_of("vit")
    state = optimizer_placements(trace, steady_step(trace), capacity_bytes=1 << 40)[0]
    problem = Problem(trace, Settings(budget_bytes=1 << 40))
    found = placed_search.PlacedSearch(problem, Place(state)).best(plain_bytes(trace))
    assert found is not None
    assert may_read_ahead(trace, state, found)
    parameters = ParameterPlacement(tier="disk", blocks=("h",), window_bytes=2, min_bytes=1, written_bytes=3)
    for change in ({"moved_bytes": 1}, {"num_parts": 2}, {"place": Place(state, parameters)}):
        assert not may_read_ahead(trace, state, msgspec.structs.replace(found, **change))
    on_cpu = msgspec.structs.replace(state, tier="host", stepped_on="cpu", exactness="changes-numerics")
    assert not may_read_ahead(trace, on_cpu, found)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"ahead": [{"after_gradients": 0, "buffer_bytes": 1}]}, "must grow from gradient to gradient"),
        ({"ahead": [{"after_gradients": 2, "buffer_bytes": 0}]}, "must grow from gradient to gradient"),
        (
            {"ahead": [{"after_gradients": k, "buffer_bytes": 9 - k} for k in (1, 2)]},
            "must grow from gradient to gradient",
        ),
        (
            {
                "ahead": [{"after_gradients": 1, "buffer_bytes": 1}],
                "tier": "host",
                "stepped_on": "cpu",
                "exactness": "changes-numerics",
            },
            "nothing of the state is read where the CPU steps it",
        ),
    ],
)
def test_a_plan_file_that_says_otherwise_is_refused(fields: dict[str, object], words: str) -> None:
    record = {"kind": "optimizer-placement", "tier": "disk", "resident_bytes": 0, "bucket_bytes": 2, "min_bytes": 1}
    with pytest.raises(msgspec.ValidationError, match=words):
        msgspec.convert(record | fields, OptimizerPlacement)
