"""Says what a rank holds at the peak of its planned step: what more ranks make less of, and what they do not."""

from msgspec.structs import replace

from memwall.planning.planfile import Plan
from memwall.planning.ranks.forecast import RankBytes
from memwall.planning.ranks.one_kind import OneKind
from memwall.planning.step_under_plan import step_under_plan
from memwall.predict.curve import peak_of
from memwall.predict.sharding.network import Network
from memwall.predict.sharding.rank_step import is_added
from memwall.trace.records import Storage

MORE_RANKS = 8
"""So many ranks more than asked for are compared with: a node of them."""
_KEPT = ("parameter", "buffer")


def rank_bytes(one: OneKind, plan: Plan, network: Network) -> tuple[RankBytes, ...]:
    """Returns what a rank holds at the peak of its step under a plan, and what it would with eight ranks more.

    The latter is left out where there is no network of so many: of one node beyond its ranks, without a link. What is
    outside of tensors is taken as the same.
    """
    here = _at_peak(one, plan, network.num_ranks)
    outside_bytes = plan.forecast.peak.process_bytes - here.tensor_bytes
    found = [replace(here, outside_bytes=outside_bytes)]
    num_more = network.num_ranks + MORE_RANKS
    has_room = num_more <= network.num_ranks_per_node
    is_whole = network.node_bytes_per_second is not None and num_more % network.num_ranks_per_node == 0
    more = one.among(replace(network, num_ranks=num_more))
    if (has_room or is_whole) and not more.why_not:
        found.append(replace(_at_peak(more, plan, num_more), outside_bytes=outside_bytes))
    return tuple(found)


def _at_peak(one: OneKind, plan: Plan, num_ranks: int) -> RankBytes:
    trace = one.trace
    step = step_under_plan(trace, plan)
    op = peak_of(trace, step).op
    here = [each for each in step.storages if each.birth <= op < each.death and each.device_type == trace.device]
    standing = [each for each in here if _stands(each)]
    gathered = [each for each in here if is_added(each) and each.category == "parameter" and each.birth >= 0]
    in_flight = [each for each in here if is_added(each) and each.category == "temporary"]
    counted = [sum(each.nbytes for each in some) for some in (here, standing, gathered, in_flight)]
    whole_bytes, standing_bytes, gathered_bytes, in_flight_bytes = counted
    return RankBytes(
        num_ranks=num_ranks,
        standing_bytes=standing_bytes,
        gathered_bytes=gathered_bytes,
        in_flight_bytes=in_flight_bytes,
        activation_bytes=whole_bytes - standing_bytes - gathered_bytes - in_flight_bytes,
        outside_bytes=0,
    )


def _stands(storage: Storage) -> bool:
    """Tells whether a storage is a rank's own of the model and its optimizer; what is gathered of it is born later."""
    return (storage.birth < 0 and storage.category in _KEPT) or storage.category in ("gradient", "optimizer_state")
