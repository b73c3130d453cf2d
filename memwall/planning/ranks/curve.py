"""The best kind of sharding over numbers of ranks, in outline: blocks are all recomputed or none, bytes live ones."""

from memwall.machine.node_links import NodeLink
from memwall.planning.ranks.forecast import CurvePoint
from memwall.planning.ranks.kinds import KINDS
from memwall.planning.ranks.one_kind import OneKind
from memwall.planning.settings import Settings
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.device import DeviceModel
from memwall.predict.sharding.network import network_of
from memwall.predict.sharding.units import TraceUnits
from memwall.trace.workload_facts import workload_facts

NUMBERS = (1, 2, 4, 8, 16, 64, 512)
"""Numbers of ranks that the curve is for."""


def curve_over_ranks(
    units: TraceUnits, settings: Settings, *, num_ranks_per_node: int, link: NodeLink | None
) -> tuple[CurvePoint, ...]:
    """Returns a point for each number of ranks that there is a network for: without a link, of one node."""
    assert settings.hardware is not None
    trace, steady = units.trace, units.steady
    process = DeviceModel(trace, settings.hardware)
    live_bytes = live_peak_bytes(steady, trace.device)
    reserved_share = process.reserved_bytes(process.untreated(steady).process_bytes) / max(1, live_bytes)
    return tuple(
        _point(units, settings, num_ranks, num_ranks_per_node, link, reserved_share)
        for num_ranks in NUMBERS
        if num_ranks <= num_ranks_per_node or (link is not None and num_ranks % num_ranks_per_node == 0)
    )


def _point(
    units: TraceUnits,
    settings: Settings,
    num_ranks: int,
    num_ranks_per_node: int,
    link: NodeLink | None,
    reserved_share: float,
) -> CurvePoint:
    assert settings.hardware is not None
    network = network_of(settings.hardware, num_ranks=num_ranks, num_ranks_per_node=num_ranks_per_node, link=link)
    trace = units.trace
    samples = trace.micro_batch * trace.num_micro_batches * num_ranks
    tokens = workload_facts(trace).tokens_per_sample
    every = (OneKind(kind, units, settings, network) for kind in KINDS)
    open_kinds = [one for one in every if not one.why_not and not one.changes_numerics]
    best: CurvePoint | None = None
    least_bytes = 0

    def look(one: OneKind, *, is_recomputed: bool) -> bool:
        """Notes what a kind needs, and what it takes if that is best; returns whether it fits."""
        nonlocal best, least_bytes
        step, added = one.recomputed() if is_recomputed else (one.cost.step, 0.0)
        process_bytes = one.outlined_bytes(step, reserved_share)
        least_bytes = min(least_bytes or process_bytes, process_bytes)
        seconds = step_seconds(one.cost.step) + added + one.cost.exposed_seconds
        fits = one.fits_in_budget(process_bytes)
        per_second = samples / seconds if seconds else 0.0  # a trace without seconds has none to add
        if fits and (best is None or seconds < (best.step_seconds or 0.0)):
            best = CurvePoint(
                num_ranks=num_ranks,
                words=one.kind.words,
                process_bytes=process_bytes,
                step_seconds=seconds,
                samples_per_second=per_second or None,
                tokens_per_second=None if tokens is None else per_second * tokens,
                is_recomputed=is_recomputed,
            )
        return fits

    too_large: list[OneKind] = []
    for one in sorted(open_kinds, key=lambda each: each.least_seconds):
        if best is not None and one.least_seconds >= (best.step_seconds or 0.0):
            break
        if look(one, is_recomputed=False):
            continue
        if one.fits_in_budget(one.standing_bytes(reserved_share)):
            look(one, is_recomputed=True)
        else:
            too_large.append(one)
    if best is not None:
        return best
    # Whatever is recomputed, what stands is there: most ways to divide a model need no closer look.
    for one in sorted(too_large, key=lambda each: each.standing_bytes(reserved_share)):
        if one.standing_bytes(reserved_share) >= least_bytes:
            break
        look(one, is_recomputed=True)
    return CurvePoint(num_ranks=num_ranks, words="", process_bytes=least_bytes)
