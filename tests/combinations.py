"""Combinations of what a test is parametrized by: few that have every value or every pair, and the rest on demand.

`make test` runs the few; the others are marked `exhaustive` and run in `make test-all`.
"""

import itertools
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import pytest

__all__ = ["every_pair", "every_value", "exhaustive"]

Values = Iterable[Any] | Mapping[str, Any]
Case = tuple[int, ...]


def every_value(*factors: Values) -> list[Any]:
    """Returns all combinations of these values; those that are not `exhaustive` have each value at least once."""
    return _combinations(factors, 1)


def every_pair(*factors: Values) -> list[Any]:
    """Returns all combinations of these values; those that are not `exhaustive` have each two values at least once.

    Two values of one factor are no pair. A mapping gives the names of its values.
    """
    return _combinations(factors, 2)


def exhaustive(*values: Any) -> Any:
    """Returns a case that `make test-all` alone runs."""
    return pytest.param(*values, marks=pytest.mark.exhaustive)


def _combinations(factors: tuple[Values, ...], strength: int) -> list[Any]:
    named = [_named(values) for values in factors]
    cases = list(itertools.product(*(range(len(names)) for names, _ in named)))
    chosen = _covering(cases, strength)
    return [
        pytest.param(
            *(values[index] for (_, values), index in zip(named, case, strict=True)),
            id="-".join(names[index] for (names, _), index in zip(named, case, strict=True)),
            marks=() if case in chosen else pytest.mark.exhaustive,
        )
        for case in cases
    ]


def _named(values: Values) -> tuple[list[str], list[Any]]:
    if isinstance(values, Mapping):
        return list(values), list(values.values())
    listed = list(values)
    return [getattr(value, "__name__", str(value)) for value in listed], listed


def _covering(cases: list[Case], strength: int) -> set[Case]:
    """Returns cases that have all that occurs, greedily: the most that is new, of single values the least used."""
    missing = {part for case in cases for part in _parts(case, strength)}
    used: Counter[Hashable] = Counter()
    chosen: set[Case] = set()

    def gain(case: Case) -> tuple[int, int]:
        num_uses = sum(used[value] for value in _parts(case, 1)) if strength == 1 else 0
        return len(missing & _parts(case, strength)), -num_uses

    while missing:
        best = max(cases, key=gain)
        chosen.add(best)
        missing -= _parts(best, strength)
        used.update(_parts(best, 1))
    return chosen


def _parts(case: Case, strength: int) -> set[Hashable]:
    """Returns the values of a case, or its pairs, each with the numbers of their factors."""
    return set(itertools.combinations(enumerate(case), min(strength, len(case))))
