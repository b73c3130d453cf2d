"""The dynamic program: exact on chains, and what the mixed-integer program is held against (P22)."""

import random
from collections.abc import Callable

import pytest
from combinations import exhaustive
from planner_dynamic import Chain, ChainBlock, ChainOption, chain_instance, solve_chain

from memwall.planning.solver.evaluate import Evaluation, evaluate
from memwall.planning.solver.instance import Instance
from memwall.planning.solver.milp import solve_milp

RandomChain = Callable[[random.Random, int], tuple[Chain, int]]


def _two_blocks() -> Chain:
    options = (
        ChainOption(name="keep", extra_seconds=0.0, resident_bytes=10, forward_bytes=12, backward_bytes=14),
        ChainOption(name="full", extra_seconds=1.0, resident_bytes=2, forward_bytes=12, backward_bytes=15),
    )
    blocks = tuple(
        ChainBlock(path=path, options=options, forward_seconds=1.0, backward_seconds=2.0) for path in ("a", "b")
    )
    return Chain(blocks=blocks, base_bytes=100, loss_bytes=3)


def test_the_rows_of_a_chain_are_its_program_points_in_the_order_of_the_step() -> None:
    instance = chain_instance(_two_blocks(), 1000)
    assert [row.label for row in instance.rows] == [
        "forward of a",
        "forward of b",
        "loss",
        "backward of b",
        "backward of a",
    ]
    # Keep both: the backward of b holds what a left, 10, and its own 14.
    assert evaluate(instance, (0, 0)).peak_bytes == 124
    # Recompute a: 2 left by it, 14 for the backward of b; a's own backward has 15.
    assert evaluate(instance, (1, 0)).peak_bytes == 116


@pytest.mark.parametrize(("budget_bytes", "options"), [(124, (0, 0)), (123, (1, 0)), (116, (1, 0)), (115, None)])
def test_the_cheapest_choice_within_a_budget(budget_bytes: int, options: tuple[int, ...] | None) -> None:
    choice = solve_chain(_two_blocks(), budget_bytes)
    assert (choice and choice.options) == options


def test_equals_the_cheapest_of_all_choices(
    random_chain: RandomChain, all_verdicts: Callable[[Instance], list[Evaluation]]
) -> None:
    rng = random.Random(1)
    num_feasible = 0
    for _ in range(150):
        chain, budget_bytes = random_chain(rng, rng.randint(1, 5))
        seconds = [
            verdict.extra_seconds for verdict in all_verdicts(chain_instance(chain, budget_bytes)) if verdict.fits
        ]
        choice = solve_chain(chain, budget_bytes)
        assert (choice is None) == (not seconds)
        if choice is not None:
            num_feasible += 1
            assert choice.extra_seconds == pytest.approx(min(seconds), abs=1e-9)
            assert choice.lower_bound_seconds == choice.extra_seconds
            assert evaluate(chain_instance(chain, budget_bytes), choice.options).fits
    assert 50 <= num_feasible < 150


@pytest.mark.parametrize("num_chains", [50, exhaustive(250)])
def test_equals_the_mixed_integer_program(random_chain: RandomChain, num_chains: int) -> None:
    rng = random.Random(2)
    num_feasible = 0
    for _ in range(num_chains):
        chain, budget_bytes = random_chain(rng, rng.randint(4, 14))
        exact = solve_chain(chain, budget_bytes)
        milp = solve_milp(chain_instance(chain, budget_bytes), gap_share_of_step=0.0)
        assert (exact is None) == (milp is None)
        if exact is not None and milp is not None:
            num_feasible += 1
            # All costs are whole hundredths of a second, so anything but equal differs by 0.01.
            assert milp.extra_seconds == pytest.approx(exact.extra_seconds, abs=1e-6)
    assert num_feasible >= 0.7 * num_chains


def test_sizes_are_rounded_up_so_that_a_coarse_quantum_never_exceeds_the_budget(random_chain: RandomChain) -> None:
    # Rounding to nearest instead is how torch's memory-budget knapsack came to exceed its capacity (pytorch #197871).
    rng = random.Random(3)
    num_answers = 0
    for _ in range(500):
        chain, budget_bytes = random_chain(rng, rng.randint(1, 8))
        choice = solve_chain(chain, budget_bytes, quantum_bytes=rng.choice([7, 16, 50]))
        if choice is not None:
            num_answers += 1
            assert evaluate(chain_instance(chain, budget_bytes), choice.options).peak_bytes <= budget_bytes
            assert choice.lower_bound_seconds == 0.0
    assert num_answers > 125


@pytest.mark.parametrize("num_chains", [500, exhaustive(10_000)])
def test_never_above_capacity(random_chain: RandomChain, num_chains: int) -> None:
    rng = random.Random(4)
    num_answers = 0
    for _ in range(num_chains):
        chain, budget_bytes = random_chain(rng, rng.randint(1, 4))
        choice = solve_chain(chain, budget_bytes)
        if choice is not None:
            num_answers += 1
            assert evaluate(chain_instance(chain, budget_bytes), choice.options).fits
    assert num_answers > num_chains // 2
