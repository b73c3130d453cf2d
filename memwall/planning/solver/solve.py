"""The inner solve: every method proposes, the evaluator decides, the cheapest proposal that fits is the plan.

Among the proposals are the knobs a user would turn by hand, so that a plan never loses to one.
"""

import logging
from collections.abc import Iterator

from memwall.errors import PlanError
from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.greedy import greedy_lowest_peak, solve_greedy, uniform_choices
from memwall.planning.solver.instance import Choice, Instance
from memwall.planning.solver.milp import milp_lowest_peak, solve_milp

__all__ = ["knob_choices", "smallest_feasible_bytes", "solve"]

_log = logging.getLogger(__name__)


def solve(instance: Instance) -> Choice | None:
    """The cheapest that fits of keep-all, the knobs, greedy and the mixed-integer program; None if none fits.

    Equal costs go to the choice that moves fewer bytes, then to the one with the lower peak. Without highspy the greedy
    answer stands, and the lower bound is 0.
    """
    knobs = list(knob_choices(instance))
    if evaluate(instance, knobs[0]).fits:
        return Choice(knobs[0], 0.0, 0.0)
    candidates = knobs
    greedy = solve_greedy(instance)
    if greedy is not None:
        candidates.append(greedy.options)
    lower_bound_seconds = 0.0
    try:
        optimum = solve_milp(instance, starts=candidates)
    except ImportError:
        _log.warning(
            "highspy is not installed: the plan is the greedy one, without a bound on what a better one could save; "
            "pip install highspy"
        )
    else:
        if optimum is not None:
            candidates.append(optimum.options)
            lower_bound_seconds = optimum.lower_bound_seconds
    best = _cheapest(instance, candidates) or _cheapest(instance, [_lowest_peak(instance)])
    if best is None:
        return None
    extra_seconds = evaluate(instance, best).extra_seconds
    return Choice(best, extra_seconds, min(lower_bound_seconds, extra_seconds))


def smallest_feasible_bytes(instance: Instance) -> int:
    """The smallest budget for which a plan exists, whatever it costs: up to 0.1 % too high, never too low.

    Without highspy, or where the program runs into its time limit, it is the lowest peak found, which may be higher.

    Raises:
        PlanError: the instance has no rows, so nothing would be too small.
    """
    if not instance.rows:
        raise PlanError("the instance has no memory rows, so there is no smallest budget; trace at least one step")
    return evaluate(instance, _lowest_peak(instance)).peak_bytes


def knob_choices(instance: Instance) -> Iterator[tuple[int, ...]]:
    """What could be set by hand: keep-all, then each option everywhere, then every n-th block fully recomputed."""
    yield (0,) * len(instance.blocks)
    yield from uniform_choices(instance)
    full = [
        next((index for index, option in enumerate(block.options) if option.name == "full"), 0)
        for block in instance.blocks
    ]
    if any(full):
        for interval in range(2, len(full) + 1):
            yield tuple(option if index % interval == 0 else 0 for index, option in enumerate(full))


def _cheapest(instance: Instance, candidates: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    verdicts = [(evaluate(instance, options), options) for options in dict.fromkeys(candidates)]
    fitting = [(v.extra_seconds, v.moved_bytes, v.peak_bytes, options) for v, options in verdicts if v.fits]
    return min(fitting)[-1] if fitting else None


def _lowest_peak(instance: Instance) -> tuple[int, ...]:
    start = greedy_lowest_peak(instance)
    try:
        return milp_lowest_peak(instance, starts=(start,)) or start
    except ImportError:
        return start
