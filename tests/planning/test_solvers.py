"""The mixed-integer program and its greedy rival: within the budget, honest about cost, as good as they say."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from planner_greedy import _Table, solve_greedy

from memwall.planning.solver import milp
from memwall.planning.solver.evaluate import Evaluation, evaluate
from memwall.planning.solver.instance import BlockOptions, Instance, Link, Option, Row
from memwall.planning.solver.milp import milp_lowest_peak, solve_milp
from memwall.planning.solver.rounding import rounded

RandomInstance = Callable[..., Instance]
AllVerdicts = Callable[[Instance], list[Evaluation]]


def _step_seconds(instance: Instance) -> float:
    return sum(block.forward_seconds + block.backward_seconds for block in instance.blocks)


@pytest.mark.slow
def test_milp_is_within_the_budget_and_its_bound_is_what_the_evaluator_says(random_instance: RandomInstance) -> None:
    # P11. Solved to optimality, a bound below the evaluated cost would mean that the program is the kinder of the two.
    rng = random.Random(11)
    num_linked = num_moving = num_feasible = 0
    for _ in range(500):
        instance = random_instance(rng, rng.randint(4, 10))
        choice = solve_milp(instance, gap_share_of_step=0.0)
        if choice is None:
            continue
        verdict = evaluate(instance, choice.options)
        num_feasible += 1
        num_linked += instance.link is not None
        num_moving += verdict.moved_bytes > 0
        assert verdict.fits
        assert verdict.peak_bytes <= instance.budget_bytes
        assert choice.extra_seconds == verdict.extra_seconds
        assert choice.lower_bound_seconds == pytest.approx(verdict.extra_seconds, abs=1e-5 * _step_seconds(instance))
    assert num_feasible >= 180
    assert num_linked >= 100
    assert num_moving >= 50


@pytest.mark.slow
def test_milp_equals_the_cheapest_of_all_choices(
    random_instance: RandomInstance, all_verdicts: AllVerdicts, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sizes this small are exact in floats: the first answer must be right, without one being cut off.
    monkeypatch.setattr(milp, "_MOST_SOLVES", 1)
    rng = random.Random(12)
    num_feasible = num_stalling = 0
    for _ in range(420):
        instance = random_instance(rng, rng.randint(1, 5))
        best = min((v for v in all_verdicts(instance) if v.fits), key=lambda v: v.extra_seconds, default=None)
        choice = solve_milp(instance, gap_share_of_step=0.0)
        assert (choice is None) == (best is None)
        if choice is not None and best is not None:
            num_feasible += 1
            num_stalling += best.stall_seconds > 0
            assert choice.extra_seconds == pytest.approx(best.extra_seconds, abs=1e-5 * _step_seconds(instance))
    assert num_feasible >= 120
    assert num_stalling >= 10


def _two_options(path: str, option: Option, *, forward_seconds: float, backward_seconds: float) -> BlockOptions:
    keep = Option(name="keep", extra_seconds=0.0, moved_bytes=0)
    return BlockOptions(
        path=path, options=(keep, option), forward_seconds=forward_seconds, backward_seconds=backward_seconds
    )


def test_milp_counts_recomputation_as_time_to_read_back_the_block_before() -> None:
    # a must move its 30 bytes, which take 3 s to come back: 1 s behind the backward of b, and 2 s more if b recomputes.
    # One of b and c must recompute; c is cheaper for itself, but hides nothing.
    blocks = (
        _two_options(
            "a", Option(name="offload", extra_seconds=0.0, moved_bytes=30), forward_seconds=0.1, backward_seconds=1.0
        ),
        _two_options(
            "b", Option(name="full", extra_seconds=2.0, moved_bytes=0), forward_seconds=0.1, backward_seconds=1.0
        ),
        _two_options(
            "c", Option(name="full", extra_seconds=1.9, moved_bytes=0), forward_seconds=0.1, backward_seconds=1.0
        ),
    )
    rows = (
        Row(label="forward of a", fixed_bytes=40, held=((30, 0), (0, 0), (0, 0))),
        Row(label="loss", fixed_bytes=0, held=((0, 0), (40, 0), (40, 0))),
    )
    link = Link(write_bytes_per_second=1e9, read_bytes_per_second=10.0, window_bytes=100, capacity_bytes=100)
    instance = Instance(blocks=blocks, rows=rows, budget_bytes=40, link=link)
    choice = solve_milp(instance, gap_share_of_step=0.0)
    assert choice is not None
    assert choice.options == (1, 1, 0)
    assert choice.extra_seconds == pytest.approx(2.0, abs=1e-5)


def test_greedy_leaves_what_has_no_room_on_the_tier_and_recomputes_instead() -> None:
    menu = (
        Option(name="keep", extra_seconds=0.0, moved_bytes=0),
        Option(name="offload", extra_seconds=0.0, moved_bytes=50),
        Option(name="full", extra_seconds=1.0, moved_bytes=0),
    )
    blocks = tuple(
        BlockOptions(path=f"blocks.{index}", options=menu, forward_seconds=1.0, backward_seconds=2.0)
        for index in range(4)
    )
    rows = (Row(label="loss", fixed_bytes=10, held=((50, 0, 0),) * 4),)
    link = Link(write_bytes_per_second=1e9, read_bytes_per_second=1e9, window_bytes=100, capacity_bytes=100)
    instance = Instance(blocks=blocks, rows=rows, budget_bytes=10, link=link)
    choice = solve_greedy(instance)
    assert choice is not None
    assert sorted(choice.options) == [1, 1, 2, 2]
    assert choice.extra_seconds == pytest.approx(2.0, abs=1e-5)


@pytest.mark.slow
def test_milp_stopped_at_its_gap_is_no_further_from_the_best_than_the_gap(
    random_instance: RandomInstance, all_verdicts: AllVerdicts
) -> None:
    rng = random.Random(13)
    num_feasible = 0
    for _ in range(150):
        instance = random_instance(rng, 5)
        choice = solve_milp(instance, gap_share_of_step=0.05)
        if choice is not None:
            num_feasible += 1
            best_seconds = min(v.extra_seconds for v in all_verdicts(instance) if v.fits)
            assert choice.lower_bound_seconds <= best_seconds + 1e-9
            assert choice.extra_seconds <= best_seconds + 0.0501 * _step_seconds(instance)
    assert num_feasible >= 40


def test_milp_is_exact_to_the_byte_at_the_size_of_a_card(all_verdicts: AllVerdicts) -> None:
    # About 24 GiB in odd bytes, the budget exactly the peak of some choice, then one byte less.
    rng = random.Random(19)
    for _ in range(8):
        blocks, held = [], []
        for index in range(9):
            options = tuple(
                Option(name=name, extra_seconds=extra, moved_bytes=0)
                for name, extra in (("keep", 0.0), ("full", rng.uniform(0.01, 0.02)))
            )
            blocks.append(
                BlockOptions(path=f"blocks.{index}", options=options, forward_seconds=0.02, backward_seconds=0.04)
            )
            saved_bytes = rng.randint(2 << 30, 3 << 30)
            held.append((saved_bytes, rng.randint(1, saved_bytes)))
        rows = (Row(label="loss", fixed_bytes=123_456_789, held=tuple(held)),)
        instance = Instance(blocks=tuple(blocks), rows=rows, budget_bytes=0, link=None)
        peak_bytes = evaluate(instance, [rng.randrange(2) for _ in blocks]).peak_bytes
        for budget_bytes in (peak_bytes, peak_bytes - 1):
            tight = replace(instance, budget_bytes=budget_bytes)
            best_seconds = min(v.extra_seconds for v in all_verdicts(tight) if v.fits)
            choice = solve_milp(tight, gap_share_of_step=0.0)
            assert choice is not None
            assert choice.extra_seconds == pytest.approx(best_seconds, abs=1e-6)


def test_an_answer_over_the_budget_is_cut_off_and_the_next_one_taken(
    random_instance: RandomInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if the solver's tolerance had let a row through: the program forgets its memory rows, the evaluator does not.
    rng = random.Random(14)
    instance = random_instance(rng, 4)
    while (optimum := solve_milp(instance, gap_share_of_step=0.0)) is None or evaluate(instance, (0,) * 4).fits:
        instance = random_instance(rng, 4)
    monkeypatch.setattr(milp, "_MOST_SOLVES", 300)
    monkeypatch.setattr(milp.Program, "add_bytes_row", lambda *_: None)
    answer = solve_milp(instance, gap_share_of_step=0.0)
    assert answer is not None
    assert evaluate(instance, answer.options).fits
    assert answer.extra_seconds == pytest.approx(optimum.extra_seconds, abs=1e-5 * _step_seconds(instance))
    monkeypatch.setattr(milp, "_MOST_SOLVES", 1)
    assert solve_milp(instance, gap_share_of_step=0.0) is None


@pytest.mark.slow
def test_the_lowest_peak_is_the_lowest_of_all_choices(
    random_instance: RandomInstance, all_verdicts: AllVerdicts
) -> None:
    rng = random.Random(16)
    for _ in range(150):
        instance = replace(random_instance(rng, rng.randint(1, 5)), budget_bytes=1 << 40)
        lowest_bytes = min(verdict.peak_bytes for verdict in all_verdicts(instance) if verdict.fits)
        options = milp_lowest_peak(instance, start=(0,) * len(instance.blocks))
        assert evaluate(instance, options).peak_bytes == lowest_bytes


@settings(max_examples=200, derandomize=True)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 9))
def test_the_greedy_tables_agree_with_the_evaluator_on_every_single_change(
    random_instance: RandomInstance, seed: int, num_blocks: int
) -> None:
    rng = random.Random(seed)
    instance = random_instance(rng, num_blocks)
    if instance.link is None:
        # Without a link nothing stalls, whatever is moved; such choices are excluded, not priced.
        instance = replace(
            instance,
            blocks=tuple(
                replace(block, options=tuple(replace(option, moved_bytes=0) for option in block.options))
                for block in instance.blocks
            ),
        )
    choice = [rng.randrange(len(block.options)) for block in instance.blocks]
    now, after = _Table(instance).seconds_after(np.array(choice))
    assert now == pytest.approx(evaluate(instance, choice).extra_seconds, abs=1e-9)
    for index, block in enumerate(instance.blocks):
        for option in range(len(block.options)):
            changed = [*choice[:index], option, *choice[index + 1 :]]
            assert after[index, option] == pytest.approx(evaluate(instance, changed).extra_seconds, abs=1e-9)


def test_greedy_finds_most_of_what_there_is(random_instance: RandomInstance, all_verdicts: AllVerdicts) -> None:
    rng = random.Random(18)
    num_feasible = num_found = 0
    for _ in range(300):
        instance = random_instance(rng, rng.randint(1, 5))
        is_feasible = any(verdict.fits for verdict in all_verdicts(instance))
        choice = solve_greedy(instance)
        num_feasible += is_feasible
        num_found += choice is not None
        if choice is not None:
            verdict = evaluate(instance, choice.options)
            assert verdict.fits
            assert choice.extra_seconds == verdict.extra_seconds
    assert num_feasible >= 80
    assert num_found >= 0.95 * num_feasible


def _equal_blocks(num_blocks: int, budget_bytes: int) -> Instance:
    """Blocks that each hold 100 bytes, or 30 at the price of 1 s, or none at 4 s, until the loss."""
    options = tuple(
        Option(name=name, extra_seconds=seconds, moved_bytes=0)
        for name, seconds in (("keep", 0.0), ("select-1", 1.0), ("full", 4.0))
    )
    blocks = tuple(
        BlockOptions(path=f"blocks.{number}", options=options, forward_seconds=10.0, backward_seconds=20.0)
        for number in range(num_blocks)
    )
    row = Row(label="loss", fixed_bytes=0, held=((100, 30, 0),) * num_blocks)
    return Instance(blocks=blocks, rows=(row,), budget_bytes=budget_bytes, link=None)


def test_many_equal_blocks_are_solved_without_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(milp, "_run", None)
    choice = solve_milp(_equal_blocks(80, budget_bytes=2000))
    assert choice is not None
    # 66 blocks hold 30 bytes, and 14 none; without integers a third of one is left over.
    assert sorted(choice.options) == [1] * 66 + [2] * 14
    assert choice.extra_seconds == 66 + 14 * 4
    assert choice.lower_bound_seconds == pytest.approx(80 + 3 * (80 - 2000 / 30))


def test_few_blocks_are_not_rounded_further_than_the_gap() -> None:
    choice = solve_milp(_equal_blocks(2, budget_bytes=125))
    assert choice is not None
    assert sorted(choice.options) == [1, 1]


def test_of_shares_the_cheapest_that_fits_is_chosen() -> None:
    instance = _equal_blocks(3, budget_bytes=135)
    whole, split = [(0, 0.0), (1, 1.0), (2, 0.0)], [(0, 0.4), (1, 0.0), (2, 0.6)]
    assert rounded(instance, [whole, split, split]) in ((1, 0, 2), (1, 2, 0))
    assert rounded(replace(instance, budget_bytes=29), [whole, split, split]) is None
    assert rounded(instance, [split] * 7) is None


def test_a_model_without_blocks_has_the_peak_that_it_has() -> None:
    rows = (Row(label="loss", fixed_bytes=7, held=()),)
    instance = Instance(blocks=(), rows=rows, budget_bytes=9, link=None)
    assert milp_lowest_peak(instance, start=()) == ()
