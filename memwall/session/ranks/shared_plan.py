"""One plan for ranks that are alike: made by the one that needs the most, for the least that any of them has.

Ranks are alike if they train the same parameters of the same modules by the same optimizer; each kind of rank has a
plan of its own. What a plan decides where a block has a collective is the same on all that wait for it: where there is
one in forward, ranks with the same modules are alike, whatever parameters they train.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from memwall.errors import InfeasibleError, MemwallError, RankError
from memwall.planning.planfile import Plan, decoded, save_for_ranks
from memwall.planning.settings import Settings
from memwall.session.ranks.agreement import Ranks
from memwall.session.ranks.figures import RankFigures, encoded_figures, of_worst
from memwall.trace.records import Trace
from memwall.units import format_bytes

_log = logging.getLogger(__name__)

Solve = Callable[[Trace, Settings], tuple[Trace, Plan]]
"""Makes a plan from a trace, and returns the trace with what planning itself has left in the process."""


class _Answer(Struct, frozen=True, kw_only=True):
    """Holds what the rank that plans tells those like it."""

    plan: bytes = b""
    """The plan file; empty where there is no plan."""
    base_bytes: int = 0
    """Process bytes before the step, with what planning has left there."""
    input_shape: tuple[int, ...] = ()
    """The batch that the plan has room for."""
    failure: str = ""
    infeasible: tuple[int, int, tuple[str, ...], tuple[str, ...]] | None = None
    """Budget, smallest feasible budget, relaxations, and what is not modelled, where nothing fits."""


def planned_together(
    ranks: Ranks, trace: Trace, settings: Settings, solve: Solve, *, trained: Sequence[bool]
) -> tuple[Trace, Plan]:
    """Returns the plan of all ranks like this one, and this one's trace with the figures that the plan was made from.

    Args:
        trained: of each parameter whether it takes gradients.

    Raises:
        InfeasibleError: nothing fits on one of them, of whatever kind: no rank goes on without the others.
        RankError: a rank that plans failed.
    """
    said = [
        msgspec.json.decode(message, type=RankFigures)
        for message in ranks.gathered(encoded_figures(trace, settings, trained))
    ]
    planners: dict[str, int] = {}
    for rank, figures in enumerate(said):
        best = planners.setdefault(figures.kind, rank)
        if figures.needed_bytes > said[best].needed_bytes:
            planners[figures.kind] = rank
    own = said[ranks.rank]
    alike = [figures for figures in said if figures.kind == own.kind]
    trace, settings = of_worst(alike, trace, settings)
    planner = planners[own.kind]
    failure: MemwallError | None = None
    answer = _Answer()
    if planner == ranks.rank:
        least_bytes = min(figures.needed_bytes for figures in alike)
        _log.info(
            "rank %d plans for %d ranks: its plain step needs %s, the least of them %s",
            *(planner, len(alike), format_bytes(own.needed_bytes), format_bytes(least_bytes)),
        )
        answer, failure = _solved(trace, settings, solve)
    message, answers = msgspec.json.encode(answer), dict[int, _Answer]()
    for source in sorted(set(planners.values())):
        answers[source] = msgspec.json.decode(ranks.shared(message, source), type=_Answer)
    if failure is not None and not isinstance(failure, InfeasibleError):
        raise failure
    for source, heard in answers.items():
        if heard.failure and heard.infeasible is None:
            raise RankError(
                f"rank {source} of {ranks.num_ranks}, which plans for all of its kind, failed: {heard.failure}"
            )
    _check_feasible(answers, planner)
    answer = answers[planner]
    plan = decoded(msgspec.json.decode(answer.plan), Plan)
    return msgspec.structs.replace(trace, base_bytes=answer.base_bytes, input_shape=answer.input_shape), plan


def _check_feasible(answers: dict[int, _Answer], planner: int) -> None:
    """Ends the planning of all kinds of ranks where one has no plan: none goes on without the others.

    Args:
        answers: what each rank that plans has found.
        planner: the one that plans for this rank.
    """
    lacking = {source: heard for source, heard in answers.items() if heard.infeasible is not None}
    if not lacking:
        return
    needs_bytes = {source: heard.infeasible[1] for source, heard in lacking.items() if heard.infeasible is not None}
    neediest = max(needs_bytes, key=needs_bytes.__getitem__)
    told = lacking.get(planner, lacking[neediest])
    assert told.infeasible is not None
    budget_bytes, _, relaxations, not_modelled = told.infeasible
    error = InfeasibleError(
        told.failure if told is lacking.get(planner) else f"rank {neediest}, of another kind: {told.failure}",
        budget_bytes=budget_bytes,
        smallest_feasible_bytes=needs_bytes[neediest],
        relaxations=relaxations,
        not_modelled=not_modelled,
    )
    if planner in lacking and neediest != planner:
        needed = format_bytes(needs_bytes[neediest], rounding="up")
        error = error.because(f"rank {neediest}, of another kind, needs more: {needed} is the least for all")
    raise error


def check_equal(ranks: Ranks, plan: Plan, *, trained: Sequence[bool]) -> None:
    """Checks that every rank that trains the same parameters of the same model has the same plan.

    Args:
        trained: of each parameter whether it takes gradients.

    Raises:
        RankError: one has another; the same message on all ranks.
    """
    trains = f"{plan.model_fingerprint} {tuple(trained)}"
    own = msgspec.json.encode((trains, plan.plan_hash, [str(action) for action in plan.actions]))
    first: dict[str, tuple[int, str, list[str]]] = {}
    for rank, message in enumerate(ranks.gathered(own)):
        kind, plan_hash, actions = msgspec.json.decode(message, type=tuple[str, str, list[str]])
        other_rank, other_hash, other_actions = first.setdefault(kind, (rank, plan_hash, actions))
        if plan_hash != other_hash:
            pairs = zip(other_actions, actions, strict=False)
            found = next((f": {one} against {two}" for one, two in pairs if one != two), "")
            raise RankError(
                f"rank {other_rank} has plan {other_hash[:12]}, rank {rank} has plan {plan_hash[:12]}{found}; give "
                "all ranks that train one model the same plan"
            )


def save_together(ranks: Ranks, plan: Plan, path: Path) -> None:
    """Writes the plans of all ranks into one file, by rank 0; all of them have to come.

    Raises:
        PlanError: the file cannot be written, on rank 0 alone.
        RankError: a rank is missing.
    """
    plans = ranks.gathered(plan.encode())
    if not ranks.rank:
        save_for_ranks(path, [decoded(msgspec.json.decode(each), Plan) for each in plans])


def agreed_excess(
    ranks: Ranks,
    excess_bytes: int,
    *,
    has_newcomer: bool = False,
    is_longer: bool = False,
    goes_on: bool = True,
) -> int:
    """Returns by how much a step exceeded its forecast on the rank where it did so most; before each step.

    Args:
        has_newcomer: whether an optimizer has begun to step on this rank: all record the next step then.
        is_longer: whether this rank's next batch has no room under the plan: all record that step then.
        goes_on: whether this rank has a batch for a further step. Once one has none they no longer agree, see
            `uneven_inputs`: 0 is returned.

    Raises:
        RankError: a rank has ended its run.
    """
    if not ranks.have_inputs:
        return 0
    said = (excess_bytes, 0, not goes_on, has_newcomer, is_longer)
    excess_bytes, number, ends, newcomer, longer = ranks.largest(said)
    ranks.have_inputs, ranks.have_newcomer, ranks.have_longer = not ends, bool(newcomer), bool(longer)
    if number:
        raise RankError(
            f"rank {number - 1} of {ranks.num_ranks} ended its run in the last step, and no rank can train on alone; "
            "its own message says why"
        )
    return 0 if ends else excess_bytes


def tell_of_failure(ranks: Ranks) -> None:
    """Tells the others, where they look at the last step's excess, that this rank does not go on."""
    if ranks.have_inputs:
        ranks.largest((0, ranks.rank + 1, 0, 0, 0))


def _solved(trace: Trace, settings: Settings, solve: Solve) -> tuple[_Answer, MemwallError | None]:
    try:
        trace, plan = solve(trace, settings)
    except InfeasibleError as error:
        known = (error.budget_bytes, error.smallest_feasible_bytes, error.relaxations, error.not_modelled)
        return _Answer(failure=str(error), infeasible=known), error
    except MemwallError as error:
        return _Answer(failure=str(error)), error
    except Exception as error:
        return _Answer(failure=f"{type(error).__name__}: {error}"), RankError(f"planning failed: {error!r}")
    return _Answer(plan=plan.encode(), base_bytes=trace.base_bytes, input_shape=trace.input_shape), None
