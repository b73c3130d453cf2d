"""The choice of how to divide a model among ranks: the fastest kind that fits, with a reason for every other one.

A kind that cannot be faster than one that fits, whatever its plan, is not searched: only the kinds that are left are.
"""

import math
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from memwall.errors import InfeasibleError
from memwall.machine.node_links import NodeLink
from memwall.planning.action import Action
from memwall.planning.planfile import Plan
from memwall.planning.ranks.curve import curve_over_ranks
from memwall.planning.ranks.forecast import RankChoice, RanksForecast
from memwall.planning.ranks.kinds import KINDS
from memwall.planning.ranks.one_kind import OneKind
from memwall.planning.ranks.rank_bytes import rank_bytes
from memwall.planning.ranks.unit_settings import gathered_ahead, some_kept
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.predict.sharding.network import Network, network_of
from memwall.predict.sharding.units import TraceUnits
from memwall.trace.records import Trace
from memwall.trace.workload_facts import workload_facts
from memwall.units import format_bytes, format_seconds

# Seconds are peaks of data sheets: of two kinds as close as this, the simpler one is taken.
_AS_FAST = 1.02

NOT_MODELLED = (
    "of several ranks: evaluation, saving and gathering of whole state; ranks with unlike batches; seconds are at the "
    "peak rates of device and links, with nothing else on them"
)


def plan_ranks(
    trace: Trace, settings: Settings, *, num_ranks: int, num_ranks_per_node: int, link: NodeLink | None
) -> tuple[Plan | None, RanksForecast]:
    """Returns the plan of each rank under the fastest kind of sharding that fits; None for the plan where none does.

    Args:
        trace: a translated step of one process with the batch of one rank.
        settings: with the device and the budget of one rank; the tier's capacity is that of one rank.

    Raises:
        UsageError: the ranks are on several nodes and there is no link, or the last node is not full.
    """
    hardware = settings.hardware
    assert hardware is not None
    network = network_of(hardware, num_ranks=num_ranks, num_ranks_per_node=num_ranks_per_node, link=link)
    units = TraceUnits(trace)
    kinds = [OneKind(kind, units, settings, network) for kind in KINDS]
    open_kinds = [one for one in kinds if not one.why_not]
    for one in open_kinds:
        if one.fits_plain:
            one.search()
    best = _fastest(open_kinds)
    for one in sorted(open_kinds, key=lambda each: each.least_seconds):
        at_most = math.inf if best is None else best.seconds()
        if not one.is_searched and one.least_seconds * _AS_FAST < at_most:
            one.search()
            best = _fastest(open_kinds)
    paths = tuple(unit.path for unit in units.of(units.steady) if not unit.is_root)
    if best is None:
        _settle_least(open_kinds)
        best = _inside_margin(open_kinds)
    else:
        # Each number of kept units is a search: of the best kind alone. Distances are few.
        offers = ((some_kept, (best,)), (gathered_ahead, None))
        for found_with, bases in offers:
            for base in bases or tuple(open_kinds):
                found = found_with(base, units.of(units.steady), at_most=best.seconds() / _AS_FAST)
                if found is not None:
                    kinds.insert(kinds.index(base) + 1, found)
                    open_kinds.insert(open_kinds.index(base) + 1, found)
                    best = _fastest(open_kinds) or best
    classes = {module.path: module.class_name for module in trace.modules if not module.is_leaf}
    forecast = RanksForecast(
        network=network,
        link=None if link is None or network.num_nodes == 1 else link.name,
        chosen=None if best is None else best.kind,
        units=paths,
        block_classes=tuple(dict.fromkeys(classes[path] for path in paths if path in classes)),
        choices=tuple(_choice(one, best, trace, network) for one in kinds),
        curve=curve_over_ranks(units, settings, num_ranks_per_node=num_ranks_per_node, link=link),
    )
    if best is None:
        return None, forecast
    made = best.plan()
    if not best.fits:
        needed_bytes = min(one.needed_bytes for one in open_kinds if not one.changes_numerics)
        made = replace(made, forecast=replace(made.forecast, smallest_feasible_budget_bytes=needed_bytes))
    forecast = replace(forecast, peak=rank_bytes(best, made, network))
    told = replace(made.forecast, ranks=forecast, not_modelled=(*made.forecast.not_modelled, NOT_MODELLED))
    return replace(made, forecast=told), forecast


def infeasible_ranks(ranks: RanksForecast, trace: Trace, settings: Settings) -> InfeasibleError:
    """Returns the error for ranks none of which can keep to the budget, whatever divides the model."""
    tried = [one for one in ranks.choices if one.process_bytes and not one.sharding.changes_numerics(trace)]
    leanest = min(tried, key=lambda one: one.process_bytes + one.margin_bytes)
    needed_bytes = leanest.process_bytes + leanest.margin_bytes
    fitting = next((point for point in ranks.curve if point.words), None)
    helps = (
        *(() if fitting is None else (f"{fitting.num_ranks} ranks, in outline by {fitting.words}",)),
        *(() if settings.tier_capacity_bytes else ("host memory of the nodes: --host SIZE",)),
        "a smaller batch on each rank, or a shorter sequence",
    )
    return InfeasibleError(
        f"no way to divide the model among {ranks.network.num_ranks} ranks fits "
        f"{format_bytes(settings.budget_bytes, rounding='down')} on each: {leanest.words} needs least, "
        f"{format_bytes(needed_bytes, rounding='up')}, its margin included. What would help: {'; '.join(helps)}",
        budget_bytes=settings.budget_bytes,
        smallest_feasible_bytes=needed_bytes,
        relaxations=helps,
        not_modelled=(NOT_MODELLED,),
    )


def _fastest(kinds: Sequence[OneKind]) -> OneKind | None:
    """Returns the first kind that fits and is as fast as any."""
    fitting = [one for one in kinds if one.found is not None and one.fits and not one.changes_numerics]
    least = min((one.seconds() for one in fitting), default=0.0)
    return next((one for one in fitting if one.seconds() <= _AS_FAST * least), None)


def _inside_margin(kinds: Sequence[OneKind]) -> OneKind | None:
    """Returns a kind that fits if the forecast is exact, the one that needs least; None for none."""
    for one in sorted(kinds, key=lambda each: each.needed_bytes):
        if not one.changes_numerics:
            one.search(has_margin=False)
            if one.found is not None:
                return one
    return None


def _settle_least(kinds: Sequence[OneKind]) -> None:
    """Sees to it that the least budget that is told of any kind has a plan."""
    exact = [one for one in kinds if not one.changes_numerics]
    while min(exact, key=lambda each: each.needed_bytes).settle():
        pass  # another may need less than what this one was raised to


def _choice(one: OneKind, best: OneKind | None, trace: Trace, network: Network) -> RankChoice:
    if one.why_not:
        named = RankChoice(sharding=one.kind, words=one.kind.words, by=one.kind.by, fits=False)
        return replace(named, reason=one.why_not)
    process, cost, found = one.process, one.cost, one.found
    if found is None:
        needed_bytes = one.needed_bytes if one.is_searched else process.budget_for(one.plain_bytes)
        margin_bytes = process.margin_bytes(needed_bytes)
        process_bytes = needed_bytes - margin_bytes
    else:
        process_bytes = found.process_bytes
        margin_bytes = process.margin_bytes(process_bytes)
    choice = RankChoice(
        sharding=one.kind,
        words=one.kind.words,
        by=one.kind.by,
        fits=one.fits,
        process_bytes=process_bytes,
        margin_bytes=margin_bytes,
        host_bytes=cost.host_bytes,
        communication_seconds=cost.communication_seconds,
    )
    if found is None:
        needed = format_bytes(process_bytes + margin_bytes, rounding="up")
        if one.is_searched or best is None:
            return replace(choice, reason=f"needs {needed} at least, margin included")
        return replace(choice, reason=f"needs {needed} as it is; under any plan it is slower than {best.kind.words}")
    seconds = one.seconds()
    samples = trace.micro_batch * trace.num_micro_batches * network.num_ranks / seconds if seconds else 0.0
    tokens = workload_facts(trace).tokens_per_sample
    return replace(
        choice,
        step_seconds=seconds,
        exposed_seconds=cost.exposed_seconds + (found.num_parts - 1) * cost.exposed_per_pass,
        samples_per_second=samples or None,
        tokens_per_second=None if tokens is None else samples * tokens,
        micro_batch=trace.micro_batch // max(1, found.num_parts),
        num_micro_batches=trace.num_micro_batches * found.num_parts,
        actions=_counted(found.actions),
        reason="" if best is None or one is best else _against(one, best),
    )


def _against(one: OneKind, best: OneKind) -> str:
    """Returns why a kind with a plan was not chosen."""
    if one.changes_numerics:
        return f"changes numerics: {one.changes_numerics}"
    more_seconds = one.seconds() - best.seconds()
    if abs(more_seconds) <= (_AS_FAST - 1) * best.seconds():
        return f"as fast as {best.kind.words}, which comes first"
    return f"{format_seconds(more_seconds)} more a step than {best.kind.words}"


def _counted(actions: Sequence[Action]) -> tuple[str, ...]:
    """Returns what actions do in words, alike ones once with their number."""
    counts = Counter(technique_of(action).what(action) for action in actions)
    return tuple(what if count == 1 else f"{what} x {count}" for what, count in counts.items())
