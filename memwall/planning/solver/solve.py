"""The inner solve: knobs and the integer program propose, the evaluator decides, the cheapest that fits is the plan.

The knobs are what a user would set by hand. The program starts from the best of them, so a plan never loses to one.
"""

from collections.abc import Iterator

from memwall.planning.solver.evaluate import evaluate
from memwall.planning.solver.instance import Choice, Instance
from memwall.planning.solver.milp import milp_lowest_peak, solve_milp


def solve(instance: Instance) -> Choice | None:
    """Returns the cheapest that fits of keep-all, the knobs and the mixed-integer program; None if none fits.

    Equal costs go to the choice that moves fewer bytes, then to the one with the lower peak.
    """
    knobs = list(knob_choices(instance))
    if evaluate(instance, knobs[0]).fits:
        return Choice(knobs[0], 0.0, 0.0)
    start = _cheapest(instance, knobs)
    optimum = solve_milp(instance, start=start)
    proposals = [start, optimum and optimum.options]
    best = _cheapest(instance, [options for options in proposals if options is not None])
    best = best or _cheapest(instance, [lowest_peak(instance)])
    if best is None:
        return None
    extra_seconds = evaluate(instance, best).extra_seconds
    return Choice(best, extra_seconds, 0.0 if optimum is None else min(optimum.lower_bound_seconds, extra_seconds))


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


def _cheapest(instance: Instance, proposals: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    verdicts = [(evaluate(instance, options), options) for options in dict.fromkeys(proposals)]
    fitting = [(v.extra_seconds, v.moved_bytes, v.peak_bytes, options) for v, options in verdicts if v.fits]
    return min(fitting)[-1] if fitting else None
