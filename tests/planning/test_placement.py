"""Optimizer state on disk as an alternative: where it is offered, what it costs, and that it changes no other plan."""

from collections.abc import Callable

import msgspec
import pytest
from located import state_placements
from plans import on_machine
from torch import Tensor, nn
from zoo import MODELS, Case

from memwall.errors import InfeasibleError
from memwall.planning.explain import disk_wear
from memwall.planning.forecast import Forecast
from memwall.planning.location import can_move_optimizer_state
from memwall.planning.one_recording import recording_search, search_at_location
from memwall.planning.search import make_plan, plan
from memwall.planning.settings import Settings
from memwall.planning.step_under_plan import step_under_actions, step_under_plan
from memwall.planning.techniques import optimizer_state
from memwall.planning.techniques.optimizer_state import MIN_STATE_BYTES, OptimizerPlacement, bucket_choices
from memwall.predict.curve import live_peak_bytes
from memwall.predict.link_time import LinkTime
from memwall.predict.state_on_disk import buffer_sizes, movable_state_bytes, state_sizes, with_state_on_disk
from memwall.trace.records import Step, Trace
from memwall.trace.steps import steady_step

MIB = 1 << 20
CAPACITY_BYTES = 1 << 40

pytestmark = pytest.mark.usefixtures("one_thread", "without_malloc")


@pytest.fixture
def smallest_without(smallest_where: Callable[..., int]) -> Callable[[Trace], int]:
    """The smallest feasible budget where optimizer state cannot move."""
    return lambda trace: smallest_where(trace, optimizer_state.TECHNIQUE, ())


def scaled(step: Step, factor: float) -> Step:
    """The step with larger state, or smaller."""
    storages = (
        msgspec.structs.replace(s, nbytes=int(s.nbytes * factor))
        if s.category in ("optimizer_state", "gradient")
        else s
        for s in step.storages
    )
    return msgspec.structs.replace(step, storages=tuple(storages))


# Legality.


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: msgspec.structs.replace(t, device="mps"), "CPU and CUDA memory only; the trace is of device 'mps'"),
        (
            lambda t: on_machine(msgspec.structs.replace(t, device="cuda"), tiers=()),
            "nothing is known of the link to host memory; pass --host SIZE together with --device NAME",
        ),
        (lambda t: on_machine(t, tiers=()), "there is no disk to move optimizer state to; pass --disk DIR"),
        (lambda t: msgspec.structs.replace(t, optimizer="LBFGS"), "LBFGS is not known to step each parameter alone"),
        (lambda t: msgspec.structs.replace(t, optimizer=""), "the optimizer is not known"),
        (lambda t: msgspec.structs.replace(t, optimizer="Muon + LBFGS"), "LBFGS is not known to step each parameter"),
        (
            lambda t: msgspec.structs.replace(t, optimizer=" + ".join(["AdamW"] * 9)),
            "9 optimizers step the model (9 x AdamW), and state moves of 8 at most",
        ),
    ],
    ids=["device", "no link", "no disk", "LBFGS", "no optimizer", "one of several", "too many"],
)
def test_it_is_legal_on_a_cpu_with_a_disk_for_optimizers_that_are_known(
    change: Callable[[Trace], Trace], words: str, a_trace: Callable[[str], Trace]
) -> None:
    trace = a_trace("gpt")
    assert can_move_optimizer_state(trace, MIB, CAPACITY_BYTES) is None
    reason = can_move_optimizer_state(change(trace), MIB, CAPACITY_BYTES)
    assert reason is not None
    assert words in reason
    assert state_placements(change(trace), steady_step(trace), capacity_bytes=CAPACITY_BYTES) == ()


def test_it_is_legal_for_several_optimizers_that_are_known(a_trace: Callable[[str], Trace]) -> None:
    several = msgspec.structs.replace(a_trace("gpt"), optimizer="Muon + AdamW")
    assert can_move_optimizer_state(several, MIB, CAPACITY_BYTES) is None


def test_buffers_are_in_memory_while_an_optimizer_steps_and_not_between_two(a_trace: Callable[[str], Trace]) -> None:
    step = steady_step(a_trace("gpt"))
    numbers = [number for number, op in enumerate(step.ops) if op.phase == "optimizer"]
    middle = numbers[len(numbers) // 2]
    ops = list(step.ops)
    ops[middle] = msgspec.structs.replace(ops[middle], phase="forward")  # another model's turn
    apart = msgspec.structs.replace(step, ops=tuple(ops))
    moved = with_state_on_disk(apart, resident_bytes=0, bucket_bytes=MIB, min_bytes=MIN_STATE_BYTES)
    buffers = [(s.birth, s.death) for s in moved.storages[len(step.storages) :]]
    assert set(buffers) == {(numbers[0], middle), (middle + 1, numbers[-1] + 1)}


def test_it_needs_state_and_room_for_it(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    assert can_move_optimizer_state(trace, 0, MIB) == "AdamW has no state that is large enough to move"
    assert can_move_optimizer_state(trace, 2 * MIB, MIB) == ("the state needs 2.0 MiB of disk, there are 1.0 MiB")


# What is offered.


def test_the_first_placement_frees_all_state_and_the_others_keep_more_for_fewer_seconds(
    a_trace: Callable[[str], Trace],
) -> None:
    trace = a_trace("gpt")
    step = steady_step(trace)
    found = state_placements(trace, step, capacity_bytes=CAPACITY_BYTES)
    state_bytes = movable_state_bytes(step, MIN_STATE_BYTES)
    assert [f.resident_bytes for f in found][:2] == [0, state_bytes // 4]
    seconds = [f.cost_seconds or 0.0 for f in found]
    assert seconds == sorted(seconds, reverse=True)
    for one in found:
        assert one.saved_bytes == state_bytes - one.resident_bytes
        assert one.saved_bytes > sum(buffer_sizes(state_sizes(step, MIN_STATE_BYTES), one.bucket_bytes))
        assert one.exactness == "bit-exact"


def test_a_placement_costs_the_disks_time_less_what_the_optimizer_computes_meanwhile(
    a_trace: Callable[[str], Trace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "_MIN_BUCKET_BYTES", 16 * MIB)  # no parameter is larger: each overlaps others
    trace = a_trace("gpt")
    step = scaled(steady_step(trace), 0.5)
    assert max(state_sizes(step, MIN_STATE_BYTES)) <= 16 * MIB
    computing = sum(op.seconds for op in step.ops if op.phase == "optimizer")

    def whole(speed: float) -> OptimizerPlacement:
        """All state on a disk so fast."""
        drive = on_machine(trace, read_bytes_per_second=speed, write_bytes_per_second=speed)
        return state_placements(drive, step, capacity_bytes=CAPACITY_BYTES)[0]

    slow, fast = whole(2e8), whole(1e15)
    state_bytes = slow.saved_bytes or 0
    assert slow.cost_seconds == pytest.approx(2 * state_bytes / 2e8 - computing)
    # Of a disk that takes no time the threads' own work is left, on the cores that compute.
    assert 0.1e-9 < (fast.cost_seconds or 0.0) / (2 * state_bytes) < 1e-9


def test_state_of_parameters_larger_than_a_bucket_overlaps_nothing(a_trace: Callable[[str], Trace]) -> None:
    trace = on_machine(a_trace("gpt"), read_bytes_per_second=1e9, write_bytes_per_second=1e9)
    large = scaled(steady_step(trace), 40)
    sizes = state_sizes(large, MIN_STATE_BYTES)
    tight, fast = state_placements(trace, large, capacity_bytes=CAPACITY_BYTES)[:2]
    assert tight.bucket_bytes < fast.bucket_bytes < max(sizes)
    assert sum(buffer_sizes(sizes, tight.bucket_bytes)) < sum(buffer_sizes(sizes, fast.bucket_bytes))
    assert (tight.cost_seconds or 0.0) > (fast.cost_seconds or 0.0)
    assert tight.cost_seconds <= 2 * sum(sizes) / 1e9


def test_moving_state_is_paid_once_a_step_however_many_micro_batches_it_has(
    magnified_trace: Callable[[Case], Trace],
) -> None:
    whole = MODELS["gpt"]("tiny")

    def accumulated(num_micro_batches: int) -> Trace:
        """The same micro-batch, that many times in a step."""

        def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            for _ in range(num_micro_batches - 1):
                whole.loss(model, batch).backward()
            return whole.loss(model, batch)

        return magnified_trace(Case(whole.model, whole.batch, loss))

    seconds_per_sample = []
    for number in (1, 2, 4):
        trace = on_machine(accumulated(number), read_bytes_per_second=1e7, write_bytes_per_second=1e7)
        assert trace.num_micro_batches == number
        found = state_placements(trace, steady_step(trace), capacity_bytes=CAPACITY_BYTES)
        seconds_per_sample.append([(one.cost_seconds or 0.0) / number for one in found])
    once, twice, four_times = seconds_per_sample
    assert once
    assert min(once) > 0
    # But for what the optimizer's own computation, measured each time, hides of it.
    assert twice == pytest.approx([seconds / 2 for seconds in once], rel=0.05)
    assert four_times == pytest.approx([seconds / 4 for seconds in once], rel=0.05)


@pytest.mark.parametrize(
    ("sizes", "tight_bytes", "fast_bytes"),
    [
        ((MIB,) * 400, 16 * MIB, 16 * MIB),
        ((33 * MIB,) * 10, 16 * MIB, 33 * MIB),
        ((33 * MIB,) * 4, 132 * MIB // 9, 132 * MIB // 9),
        ((14 * MIB, 18 * MIB) * 12 + (294 * MIB,), 18 * MIB, 18 * MIB),
        ((MIB,) * 40, 4 * MIB, 4 * MIB),
        ((MIB // 8,) * 40, 2 * MIB, 2 * MIB),
    ],
    ids=["small ones", "ten large ones", "four large ones", "a GPT with a large embedding", "little", "hardly any"],
)
def test_buckets_hold_several_parameters_or_one_where_three_are_little_of_the_state(
    sizes: tuple[int, ...], tight_bytes: int, fast_bytes: int
) -> None:
    assert bucket_choices(sizes) == (tight_bytes, fast_bytes)


# In the search.


@pytest.mark.parametrize("name", ["gpt", "vit"])
def test_a_budget_that_nothing_else_meets_is_met_with_state_on_disk(
    name: str,
    a_trace: Callable[[str], Trace],
    smallest_without: Callable[[Trace], int],
    smallest_bytes: Callable[..., int],
) -> None:
    trace = a_trace(name)
    least, least_without = smallest_bytes(trace), smallest_without(trace)
    assert least < least_without - 0.3 * movable_state_bytes(steady_step(trace), MIN_STATE_BYTES)
    budget_bytes = (least + least_without) // 2
    found = plan(trace, budget=budget_bytes)
    (action,) = [a for a in found.actions if isinstance(a, OptimizerPlacement)]
    forecast = found.forecast
    assert forecast.fits
    assert forecast.peak.process_bytes + forecast.margin_bytes <= budget_bytes
    assert forecast.peak.allocated_bytes == live_peak_bytes(step_under_plan(trace, found), "cpu")
    assert forecast.smallest_feasible_budget_bytes == least
    assert forecast.moved_bytes_per_step >= (action.saved_bytes or 0) > 0
    assert forecast.peak.disk_bytes == forecast.moved_bytes_per_step
    assert forecast.step_seconds is not None
    assert forecast.plain_step_seconds is not None
    assert forecast.step_seconds >= forecast.plain_step_seconds + (action.cost_seconds or 0.0)
    assert any("of optimizer state are read from disk and written in each step" in line for line in forecast.binding)
    assert any("are written to the disk in a day of such steps" in line for line in forecast.binding)


@pytest.mark.slow
def test_with_more_room_more_of_the_state_stays(
    a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int], smallest_bytes: Callable[..., int]
) -> None:
    trace = a_trace("gpt")
    least, least_without = smallest_bytes(trace), smallest_without(trace)
    kept = []
    # Just below the budgets that are met inside their margin without it.
    most = int(trace.base_bytes + 0.94 * (least_without - trace.base_bytes))
    for budget_bytes in (least, (least + most) // 2, most):
        (action,) = [a for a in plan(trace, budget=budget_bytes).actions if isinstance(a, OptimizerPlacement)]
        kept.append(action.resident_bytes)
    assert kept == sorted(kept)
    assert kept[0] == 0 < kept[-1]


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_a_plan_that_costs_less_without_it_stays_as_it_is(
    share: float,
    a_trace: Callable[[str], Trace],
    smallest_without: Callable[[Trace], int],
    plain_bytes: Callable[[Trace], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = on_machine(a_trace("gpt"), read_bytes_per_second=1e6, write_bytes_per_second=1e6)
    least = smallest_without(slow)
    budget_bytes = int(least + share * (plain_bytes(slow) - least))
    found = plan(slow, budget=budget_bytes).forecast
    monkeypatch.setattr(optimizer_state.TECHNIQUE, "locations", lambda *_: ())
    without = plan(slow, budget=budget_bytes).forecast
    assert found.actions == without.actions
    assert found.step_seconds == without.step_seconds
    assert (found.smallest_feasible_budget_bytes or 0) < (without.smallest_feasible_budget_bytes or 0)


@pytest.mark.slow
def test_where_memory_suffices_state_is_moved_only_for_a_clearly_shorter_step(
    a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = on_machine(a_trace("gpt"), read_bytes_per_second=1e12, write_bytes_per_second=1e12)
    # Saved tensors would be as cheap to move on such a disk; here they cannot.
    monkeypatch.setattr(search_at_location, "can_offload", lambda *_: "there is no such thing")
    budget_bytes = smallest_without(fast) + 16 * MIB

    def with_state_moved_from(times_shorter: float) -> Forecast:
        monkeypatch.setattr(recording_search, "_CLEARLY_SHORTER", times_shorter)
        return plan(fast, budget=budget_bytes).forecast

    in_memory, on_disk = with_state_moved_from(1e9), with_state_moved_from(1.0)
    assert in_memory.fits
    assert on_disk.fits
    times_shorter = (in_memory.step_seconds or 0.0) / (on_disk.step_seconds or 0.0)
    assert times_shorter > 1.05
    assert not any(isinstance(action, OptimizerPlacement) for action in in_memory.actions)
    assert any(isinstance(action, OptimizerPlacement) for action in on_disk.actions)
    assert with_state_moved_from(0.99 * times_shorter) == on_disk
    assert with_state_moved_from(1.01 * times_shorter) == in_memory


def test_an_optimizer_that_cannot_be_stepped_in_parts_keeps_its_state_in_memory(
    a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int], smallest_bytes: Callable[..., int]
) -> None:
    trace = a_trace("gpt")
    budget_bytes = (smallest_bytes(trace) + smallest_without(trace)) // 2
    with pytest.raises(InfeasibleError) as error:
        make_plan(trace, Settings(budget_bytes=budget_bytes, can_move_state=False))
    assert error.value.smallest_feasible_bytes == smallest_without(trace)


@pytest.mark.slow
def test_a_disk_too_small_for_the_state_leaves_the_budget_infeasible(
    a_trace: Callable[[str], Trace], smallest_without: Callable[[Trace], int], smallest_bytes: Callable[..., int]
) -> None:
    trace = a_trace("gpt")
    budget_bytes = (smallest_bytes(trace) + smallest_without(trace)) // 2
    assert make_plan(trace, Settings(budget_bytes=budget_bytes)).forecast.fits
    state_bytes = movable_state_bytes(steady_step(trace), MIN_STATE_BYTES)
    with pytest.raises(InfeasibleError):
        make_plan(trace, Settings(budget_bytes=budget_bytes, tier_capacity_bytes=state_bytes - 1))


def test_the_step_under_a_placement_is_the_one_the_search_replays(a_trace: Callable[[str], Trace]) -> None:
    trace = a_trace("gpt")
    step = steady_step(trace)
    (whole, *_) = state_placements(trace, step, capacity_bytes=CAPACITY_BYTES)
    standing = sum(
        s.nbytes for s in step_under_actions(trace, step, (whole,)).storages if s.category == "optimizer_state"
    )
    assert standing == sum(
        s.nbytes for s in step.storages if s.category == "optimizer_state" and s.nbytes < MIN_STATE_BYTES
    )


# In words.


def test_a_plan_says_what_its_writes_wear_off_the_disk() -> None:
    # 168 GB a step (14e9 parameters with 12 bytes each), every 10 s.
    link = LinkTime(
        tier="disk",
        written_bytes=168 * 10**9,
        read_bytes=168 * 10**9,
        batched_bytes=0,
        write_bytes_per_second=26e9,
        read_bytes_per_second=48e9,
        compute_seconds=1.0,
    )
    text = "1.29 PiB are written to the disk in a day of such steps, 10 s each"
    assert disk_wear(link, 10.0) == (text,)
    sized = msgspec.structs.replace(link, tier_total_bytes=7_680 * 10**9)
    assert disk_wear(sized, 10.0) == (f"{text}: 1.9e+02 times the file system's size",)
    assert disk_wear(None, 10.0) == disk_wear(msgspec.structs.replace(link, tier="host"), 10.0) == ()
