"""The combinations that a test is run with by default have every value, or every pair of values."""

import itertools
from typing import Any

from combinations import every_pair, every_value

OPTIMIZERS = [f"optimizer {number}" for number in range(24)]
FLAGS = {"yes": True, "no": False}


def default(cases: list[Any]) -> list[tuple[Any, ...]]:
    return [case.values for case in cases if not case.marks]


def test_every_value_is_there_once_and_the_shorter_factors_take_turns() -> None:
    cases = every_value(OPTIMIZERS, FLAGS, "abc")
    assert len(cases) == 24 * 2 * 3
    few = default(cases)
    assert sorted(optimizer for optimizer, _, _ in few) == sorted(OPTIMIZERS)
    assert sorted(flag for _, flag, _ in few) == [False] * 12 + [True] * 12
    assert sorted(letter for _, _, letter in few) == list("aaaaaaaabbbbbbbbcccccccc")


def test_every_pair_is_there_and_few_cases_are() -> None:
    cases = every_pair(FLAGS, "abc", range(4), range(3))
    few = default(cases)
    assert len(cases) == 72
    assert len(few) <= 14
    factors = ([True, False], "abc", range(4), range(3))
    for (one, ones), (other, others) in itertools.combinations(enumerate(factors), 2):
        assert {(case[one], case[other]) for case in few} == set(itertools.product(ones, others))


def test_three_flags_have_all_pairs_in_four_cases() -> None:
    assert len(default(every_pair(FLAGS, FLAGS, FLAGS))) == 4


def test_names_are_those_of_the_values() -> None:
    assert [case.id for case in every_pair(FLAGS, [int, 3])] == ["yes-int", "yes-3", "no-int", "no-3"]
