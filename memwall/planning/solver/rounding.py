"""From a relaxed program's shares of options to a choice: deep models leave one block or two between two options."""

from collections.abc import Sequence
from itertools import product
from math import prod

from memwall.planning.solver.evaluate import cheapest
from memwall.planning.solver.instance import Instance

# A share below this is what floats leave of none.
_LEAST_SHARE = 1e-6
# Combinations that are looked at: each is evaluated, which takes about a millisecond for a deep model.
_MOST_COMBINATIONS = 64


def rounded(instance: Instance, shares: Sequence[Sequence[tuple[int, float]]]) -> tuple[int, ...] | None:
    """Returns the cheapest choice that fits, of the options that have shares; None if none fits or there are too many.

    Args:
        shares: for each block the options that may be chosen, each with its part of one.
    """
    chosen = [[option for option, share in block if share > _LEAST_SHARE] for block in shares]
    if prod(map(len, chosen)) > _MOST_COMBINATIONS:
        return None
    return cheapest(instance, product(*chosen))
