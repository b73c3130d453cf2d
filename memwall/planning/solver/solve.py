"""The inner solve: knobs and the integer program propose, the evaluator decides, the cheapest that fits is the plan.

The knobs are what a user would set by hand. The program starts from the best of them, so a plan never loses to one.
"""

import math
from collections.abc import Iterator

from memwall.planning.solver.evaluate import cheapest, evaluate, price_of
from memwall.planning.solver.instance import Choice, Instance
from memwall.planning.solver.milp import milp_lowest_peak, solve_milp


def solve(instance: Instance, *, below_seconds: float = math.inf, is_outline: bool = False) -> Choice | None:
    """Returns the cheapest that fits of keep-all, the knobs and the mixed-integer program; None if none fits.

    Equal costs go to the choice that moves fewer bytes, then to the one with the lower peak.

    Args:
        below_seconds: what a choice has to cost less than to be of use: none is looked for where a bound says that
            there is none, so that what is returned may cost more, or be None.
        is_outline: whether a choice near the cheapest will do: of what has integers, which may take seconds, nothing is
            solved.
    """
    knobs = list(knob_choices(instance))
    if evaluate(instance, knobs[0]).fits:
        return Choice(knobs[0], 0.0, 0.0)
    optimum = solve_milp(instance, starts=knobs, below_seconds=below_seconds, is_outline=is_outline)
    if optimum is not None:
        # What costs less than the bound does not fit, and what costs more is of no use: few are looked at row by row.
        cheaper = [each for each in knobs if price_of(instance, each).extra_seconds <= optimum.extra_seconds]
        near = [each for each in cheaper if price_of(instance, each).extra_seconds >= optimum.lower_bound_seconds]
        best = cheapest(instance, [*near, optimum.options])
        assert best is not None, "the optimum fits"
        extra_seconds = evaluate(instance, best).extra_seconds
        return Choice(best, extra_seconds, min(optimum.lower_bound_seconds, extra_seconds))
    best = cheapest(instance, [each for each in knobs if price_of(instance, each).extra_seconds < below_seconds])
    if best is None and below_seconds == math.inf:
        best = cheapest(instance, [lowest_peak(instance)])
    return None if best is None else Choice(best, evaluate(instance, best).extra_seconds, 0.0)


def smallest_feasible_bytes(instance: Instance) -> int:
    """Returns the smallest budget for which a plan exists, whatever it costs: up to 0.1 % too high, never too low.

    Where the program runs into its time limit, it is the lowest peak found, which may be higher.
    """
    return evaluate(instance, lowest_peak(instance)).peak_bytes


def lowest_peak(instance: Instance) -> tuple[int, ...]:
    """Returns the options with the lowest peak among those that the next tier has room for, whatever they cost."""
    room_bytes = max(0, instance.link.capacity_bytes) if instance.link else 0
    verdicts = [(evaluate(instance, options), options) for options in dict.fromkeys(knob_choices(instance))]
    start = min((v.peak_bytes, v.extra_seconds, options) for v, options in verdicts if v.moved_bytes <= room_bytes)[-1]
    return milp_lowest_peak(instance, start=start)


def knob_choices(instance: Instance) -> Iterator[tuple[int, ...]]:
    """Yields what could be set by hand: keep-all, each option everywhere, and every n-th block fully recomputed."""
    positions = [{option.name: index for index, option in enumerate(block.options)} for block in instance.blocks]
    yield (0,) * len(positions)
    for name in dict.fromkeys(option.name for block in instance.blocks for option in block.options):
        yield tuple(position.get(name, 0) for position in positions)
    full = [position.get("full", 0) for position in positions]
    if any(full):
        for interval in range(2, len(full) + 1):
            yield tuple(option if index % interval == 0 else 0 for index, option in enumerate(full))
