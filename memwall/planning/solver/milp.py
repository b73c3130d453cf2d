"""The inner problem as a mixed-integer linear program, solved by HiGHS.

One binary per block and option; one row per program point; the link's queue and stalls as continuous columns that
follow `evaluate` exactly, so that the objective of an integer solution is what `evaluate` says. Floats never decide:
the answer is evaluated in integer bytes, and one that is over the budget is cut off and the program solved again.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from memwall.planning.solver.evaluate import cheapest, evaluate
from memwall.planning.solver.instance import Choice, Instance, Int64s
from memwall.planning.solver.program import Program
from memwall.planning.solver.quiet_streams import nothing_printed
from memwall.planning.solver.rounding import rounded

if TYPE_CHECKING:
    import highspy

_MOST_SOLVES = 6
_MOST_SECONDS = 10.0
"""The time limit of each solve; there is more than one only if an answer fails verification."""
_MOST_NODES = 8_000
"""Nodes of the search, times binaries: the deeper a model, the longer each takes, and the less it finds."""
_GAP_SHARE_OF_PEAK = 0.001
_MOST_BYTES = 1 << 61
# HighsInfo's kSolutionStatusFeasible; after a time limit the incumbent has it too.
_FEASIBLE = 2
_TIES = 1e-6
"""Price of moving everything that could be moved, as a part of the step: decides between equal choices only."""


def solve_milp(
    instance: Instance,
    *,
    starts: Sequence[tuple[int, ...]] = (),
    gap_share_of_step: float = 0.001,
    below_seconds: float = math.inf,
    is_outline: bool = False,
) -> Choice | None:
    """Returns the cheapest choice within the budget, up to the gap; the time limit keeps the best one found by then.

    Without integers the program is solved first: of a deep model all but a few blocks have one option then, and the
    choice next to that is mostly within the gap. One thread and a fixed seed: equal inputs give equal answers, unless
    the time limit ends the solve.

    Args:
        instance: what to solve.
        starts: choices of which HiGHS begins from the cheapest that fits, or from the one next to the relaxed optimum.
        gap_share_of_step: stop when the bound is within this part of the step's forward and backward seconds. Relative
            to the step, because a plan that costs next to nothing need not be proven cheapest to the last bit.
        below_seconds: what a choice has to cost less than to be of use.
        is_outline: whether the choice next to the relaxed optimum will do, however far from its bound it is.

    Returns:
        A choice that `evaluate` approves, and the bound; None if there is none, none was found or the bound says that
        none is of use.
    """
    step_seconds = sum(block.forward_seconds + block.backward_seconds for block in instance.blocks)
    unit_seconds = (
        step_seconds / 1000
        or max((option.extra_seconds for block in instance.blocks for option in block.options), default=0.0)
        or 1.0
    )
    program = _seconds_program(instance, unit_seconds)
    if program is None:
        return None
    gap = gap_share_of_step * step_seconds / unit_seconds

    def as_choice(options: tuple[int, ...], extra_seconds: float, bound: float) -> Choice:
        lower_bound_seconds = max(0.0, (bound - program.ties) * unit_seconds)
        if extra_seconds - lower_bound_seconds <= 2 * _TIES * step_seconds:
            lower_bound_seconds = extra_seconds
        return Choice(options, extra_seconds, min(lower_bound_seconds, extra_seconds))

    near = _near_relaxed(instance, program)
    if (near.bound - program.ties) * unit_seconds >= below_seconds:
        return None
    if near.options is not None:
        extra_seconds = evaluate(instance, near.options).extra_seconds
        if is_outline or extra_seconds / unit_seconds - near.bound <= gap:
            return as_choice(near.options, extra_seconds, near.bound)
        starts = [*starts, near.options]
    if is_outline:
        return None
    start = cheapest(instance, starts)
    for _ in range(_MOST_SOLVES):
        found = _run(program, start=start, absolute_gap=gap)
        if found.options is None:
            return None
        verdict = evaluate(instance, found.options)
        if verdict.fits:
            return as_choice(found.options, verdict.extra_seconds, found.bound)
        # Over the budget by less than the solver's tolerance. Only this one choice is cut off: the bound stays valid.
        picked = [(offset + option, 1.0) for offset, option in zip(program.offsets, found.options, strict=True)]
        program.add_row(picked, -math.inf, len(picked) - 1.0)
    return None


def milp_lowest_peak(instance: Instance, *, start: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the choice with the lowest peak, up to the gap: the budget becomes the quantity to minimise.

    The link's speed plays no part: any move is possible for one who waits. Its room does.

    Args:
        start: a choice that the tier has room for, from which HiGHS begins.
    """
    program = _peak_program(instance)
    if program is None:
        return start
    gap = _GAP_SHARE_OF_PEAK * evaluate(instance, start).peak_bytes / program.unit_bytes
    found = _run(program, start=start, absolute_gap=gap).options
    anything = instance.within(_largest_bytes(instance))
    return found if found and evaluate(anything, found).fits else start


def _row_terms(program: Program, instance: Instance) -> tuple[Int64s, Int64s]:
    """Returns bytes above each block's least option [rows, allowed columns], and the sums of those leasts [rows].

    Of what is not allowed nothing is told. Smaller numbers are what a solver does better with.
    """
    held = instance.held[:, program.allowed]
    if not program.may:  # a model without blocks
        return held, held.sum(axis=1)
    counts = [len(options) for options in program.may]
    begins = np.cumsum([0, *counts[:-1]], dtype=np.intp)
    least = np.minimum.reduceat(held, begins, axis=1)
    return held - np.repeat(least, counts, axis=1), least.sum(axis=1)


def _seconds_program(instance: Instance, unit_seconds: float) -> Program | None:
    """Asks for least seconds, in `unit_seconds`; None where a row is over the budget whatever is chosen."""
    program = Program(instance)
    if instance.rows:
        above, least_bytes = _row_terms(program, instance)
        # What a file claims may be more than a number of 64 bits holds, with what is taken off it.
        budget_bytes = max(-_MOST_BYTES, min(instance.budget_bytes, _MOST_BYTES))
        left_bytes = budget_bytes - instance.fixed_bytes - least_bytes
        if (left_bytes < 0).any():
            return None
        for sizes, room_bytes in zip(above, left_bytes.tolist(), strict=True):
            program.add_bytes_row(program.allowed[sizes > 0], sizes[sizes > 0], room_bytes)
    most_moved = sum(
        max(block.options[o].moved_bytes for o in program.may[i]) for i, block in enumerate(instance.blocks)
    )
    step_units = sum(block.forward_seconds + block.backward_seconds for block in instance.blocks) / unit_seconds
    program.ties = _TIES * step_units if most_moved else 0.0
    for i, block in enumerate(instance.blocks):
        for x, o in program.each(i):
            option = block.options[o]
            program.costs[x] = (option.extra_seconds + option.leaving.wait_seconds) / unit_seconds
            program.costs[x] += program.ties * option.moved_bytes / max(1, most_moved)
    if most_moved:
        _add_writes(program, instance, unit_seconds)
        _add_reads(program, instance, unit_seconds)
    return program


def _add_writes(program: Program, instance: Instance, unit_seconds: float) -> None:
    """Adds the out-queue, in time: of both figures of `Leaving` a row each, for the wait and for when the link is done.

    What is waited for without a queue is a price of the option; a stall is only what comes on top.
    """
    link = instance.link
    assert link is not None
    most_queued = link.window_bytes / link.write_bytes_per_second / unit_seconds
    before: list[tuple[int, float]] = []
    for i, block in enumerate(instance.blocks):
        moving = [(x, block.options[o].leaving) for x, o in program.each(i) if block.options[o].moved_bytes]
        is_last = i == len(instance.blocks) - 1
        queue = program.add_column(1.0 if is_last and link.piece_bytes else 0.0, math.inf)
        ends = [(queue, 1.0), *((x, one.wait_seconds / unit_seconds) for x, one in moving)]
        if before and moving:
            stall = program.add_column(1.0, math.inf)
            ends.append((stall, 1.0))
            # Of the options that move nothing none waits, however long the queue.
            more = [(x, (one.wait_behind_seconds - one.wait_seconds) / unit_seconds) for x, one in moving]
            sizes = [(x, -most_queued - max(-most_queued, units)) for x, units in more]
            program.add_row([(stall, 1.0), *((x, -size) for x, size in before), *sizes], -most_queued, math.inf)
        base = -block.forward_seconds / unit_seconds
        for held, figures in (
            ([], [(x, one.done_seconds) for x, one in moving]),
            (before, [(x, one.done_behind_seconds) for x, one in moving]),
        ):
            taken = dict(ends)
            for x, seconds in figures:
                taken[x] = taken.get(x, 0.0) - seconds / unit_seconds
            program.add_row([*taken.items(), *((x, -size) for x, size in held)], base, math.inf)
        before = [(queue, 1.0)]


def _add_reads(program: Program, instance: Instance, unit_seconds: float) -> None:
    """Adds reading back: ahead[i] <= what the link has left beside block i + 1; stall[i] >= lead - ahead[i].

    What no choice of the block after it can hide is a price of the option; a stall is only the rest.
    """
    link = instance.link
    assert link is not None
    rate = link.read_bytes_per_second * unit_seconds
    idle: list[tuple[int, float]] = []  # beside the block after this one, with what it has for certain, and at most
    base = most_idle = 0.0
    for i in reversed(range(len(instance.blocks))):
        block = instance.blocks[i]
        own: list[tuple[int, float]] = []  # what its stalls and its own reading leave the link, beside its seconds
        leads: list[tuple[int, float]] = []
        reads: list[tuple[int, float]] = []
        for x, o in program.each(i):
            option = block.options[o]
            lead = (option.moved_bytes - option.hidden_bytes) / rate
            never_hidden = max(0.0, lead - most_idle)
            program.costs[x] += never_hidden
            own.append((x, option.extra_seconds / unit_seconds + never_hidden - option.moved_bytes / rate))
            if lead > never_hidden:
                leads.append((x, lead - never_hidden))
            if option.moved_bytes:
                reads.append((x, option.moved_bytes / rate))
        if leads:
            stall = program.add_column(1.0, math.inf)
            own.append((stall, 1.0))
        if reads and most_idle > 0:
            ahead = program.add_column(0.0, most_idle)
            program.add_row([(ahead, 1.0), *((x, -size) for x, size in reads)], -math.inf, 0.0)
            program.add_row([(ahead, 1.0), *((x, -size) for x, size in idle)], -math.inf, base)
            own.append((ahead, 1.0))
            leads = [*((x, -size) for x, size in leads), (ahead, 1.0)] if leads else []
        if leads:
            program.add_row([(stall, 1.0), *leads], 0.0, math.inf)
        idle, base = own, block.backward_seconds / unit_seconds
        most_idle = base + max((block.options[o].extra_seconds for _, o in program.each(i)), default=0.0) / unit_seconds


def _peak_program(instance: Instance) -> Program | None:
    """Asks for the least peak, which is the last column, in units that keep it near a few thousand."""
    if not instance.rows:
        return None
    program = Program(instance)
    above, least_bytes = _row_terms(program, instance)
    program.unit_bytes = max(1, _largest_bytes(instance) // (1 << 20))
    floors = least_bytes + instance.fixed_bytes
    lowers = (floors - floors.max()) / program.unit_bytes
    peak = program.add_column(1.0, math.inf)
    for sizes, lower in zip(above, lowers.tolist(), strict=True):
        columns = np.append(peak, program.allowed[sizes > 0])
        program.add_terms(columns, np.append(1.0, -sizes[sizes > 0] / program.unit_bytes), lower, math.inf)
    return program


def _largest_bytes(instance: Instance) -> int:
    """Returns a peak that no choice exceeds."""
    if not instance.rows:
        return 0
    most = np.maximum.reduceat(instance.held, instance.offsets, axis=1).sum(axis=1)
    return int((instance.fixed_bytes + most).max())


class _Found(NamedTuple):
    options: tuple[int, ...] | None
    bound: float


def _near_relaxed(instance: Instance, program: Program) -> _Found:
    """Returns the choice next to the optimum of the program without integers, and that optimum as its bound.

    The bound is infinite where not even parts of options fit.
    """
    import highspy

    solver = _solver()
    solver.passModel(_linear(program))
    solver.run()
    info = solver.getInfo()
    if info.primal_solution_status != _FEASIBLE:
        is_infeasible = solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        return _Found(None, math.inf if is_infeasible else -math.inf)
    values = np.array(solver.getSolution().col_value)
    shares = [[(option, values[x]) for x, option in program.each(block)] for block in range(len(program.offsets))]
    return _Found(rounded(instance, shares), float(info.objective_function_value))


def _linear(program: Program) -> "highspy.HighsLp":
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.costs), len(program.row_lowers)
    lp.col_cost_ = np.array(program.costs)
    lp.col_lower_ = np.zeros(lp.num_col_)
    lp.col_upper_ = np.array(program.uppers)
    lp.row_lower_, lp.row_upper_ = np.array(program.row_lowers), np.array(program.row_uppers)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.num_col_, lp.a_matrix_.num_row_ = lp.num_col_, lp.num_row_
    lp.a_matrix_.start_ = np.array(program.row_starts, dtype=np.int32)
    lp.a_matrix_.index_ = np.array(program.columns, dtype=np.int32)
    lp.a_matrix_.value_ = np.array(program.values)
    return lp


def _run(program: Program, *, start: tuple[int, ...] | None, absolute_gap: float) -> _Found:
    """Returns the best integer solution HiGHS finds, and its bound in the program's units (-inf for none)."""
    import highspy

    lp = _linear(program)
    continuous = lp.num_col_ - program.num_binaries
    lp.integrality_ = [highspy.HighsVarType.kInteger] * program.num_binaries + [
        highspy.HighsVarType.kContinuous
    ] * continuous

    solver = _solver()
    # Over the cells of benchmarks/planner.py presolve takes longer than it saves, and leaves a weaker bound.
    solver.setOptionValue("presolve", "off")
    solver.setOptionValue("mip_max_nodes", max(1, _MOST_NODES // max(1, program.num_binaries)))
    solver.setOptionValue("mip_rel_gap", 0.0)
    solver.setOptionValue("mip_abs_gap", max(absolute_gap, 1e-6))
    solver.passModel(lp)
    if start is not None:
        columns = np.arange(program.num_binaries, dtype=np.int32)
        values = np.zeros(program.num_binaries)
        values[[offset + option for offset, option in zip(program.offsets, start, strict=True)]] = 1.0
        solver.setSolution(program.num_binaries, columns, values)
    solver.run()
    return _read(solver, program)


def _solver() -> "highspy.Highs":
    import highspy

    # HiGHS 1.16 names itself on standard output here, before there is an object that could be told not to.
    with nothing_printed():
        solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.setOptionValue("output_flag", False)
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("parallel", "off")
    solver.setOptionValue("random_seed", 0)
    solver.setOptionValue("time_limit", _MOST_SECONDS)
    return solver


def _read(solver: "highspy.Highs", program: Program) -> _Found:
    info = solver.getInfo()
    bound = float(info.mip_dual_bound)
    bound = bound if math.isfinite(bound) else -math.inf
    if info.primal_solution_status != _FEASIBLE:
        return _Found(None, bound)
    values = np.array(solver.getSolution().col_value)
    chosen = (max(program.each(i), key=lambda pair: values[pair[0]])[1] for i in range(len(program.offsets)))
    return _Found(tuple(chosen), bound)
