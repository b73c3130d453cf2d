"""The buckets in which DistributedDataParallel sums gradients: their order decides in which order numbers are added."""

from collections.abc import Sequence
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memwall.patches import Patches
from memwall.torch_internals.modules import waits_for_new_buckets
from memwall.torch_internals.names import find

_FOR = "going on with DistributedDataParallel to the same bits"
_names = [
    find(f"torch.nn.parallel.DistributedDataParallel.{name}", _FOR)
    for name in ("_get_ddp_logging_data", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")
]
_assign = find("torch.distributed._compute_bucket_assignment_by_size", _FOR)
_initialize = find("torch.nn.parallel.DistributedDataParallel._ddp_init_helper", _FOR)


def _is_known_whole(parallel: DistributedDataParallel) -> bool:
    """Returns whether a new reducer has all that the present one has: a hook or a static graph would be lost."""
    if parallel.static_graph or None in (*_names, _assign, _initialize):
        return False
    return not parallel._get_ddp_logging_data().get("comm_hook")


def buckets_of(parallel: DistributedDataParallel) -> list[list[nn.Parameter]]:
    """Returns the parameters of each bucket, as they were made anew after the first step; [] before that.

    Also where this torch does not tell, or where a communication hook or a static graph is set, which a new reducer
    would not have.
    """
    if waits_for_new_buckets(parallel) or not _is_known_whole(parallel):
        return []
    order = parallel._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    parameters, _ = parallel._build_params_for_reducer()
    return [[parameters[int(number)] for number in bucket.split()] for bucket in order.split(",") if bucket.strip()]


def make_buckets(parallel: DistributedDataParallel, buckets: Sequence[Sequence[nn.Parameter]]) -> bool:
    """Makes a new reducer, whose first step has the buckets that it would have later: those of `buckets_of`.

    All ranks do so with the same buckets. Source: torch/nn/parallel/distributed.py, `_ddp_init_helper` (2.13).

    Returns:
        Whether it did: not where `buckets_of` would tell none.
    """
    if not _is_known_whole(parallel):
        return False
    parameters, are_sparse = parallel._build_params_for_reducer()
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    order = [[numbers[id(parameter)] for parameter in bucket] for bucket in buckets]

    def as_given(*arguments: Any) -> tuple[list[list[int]], list[int]]:
        _, limits = _assign(*arguments)
        return order[::-1], [max(limits)] * len(order)  # torch turns them round

    names = parallel._build_debug_param_to_name_mapping(parameters)
    # The old one takes its hooks off the parameters, and gives its buckets back before there are new ones.
    parallel.reducer = parallel.logger = None  # type: ignore[assignment]
    with Patches("going on with the buckets of the interrupted run") as patches:
        patches.replace(distributed, "_compute_bucket_assignment_by_size", as_given)
        parallel._ddp_init_helper(parameters, are_sparse, names, parallel.static_graph)
    return True
