"""The buckets in which DistributedDataParallel sums gradients: their order decides in which order numbers are added."""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
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
_FOR_JOINT = "doing a step of several ranks again after memory ran out on one of them"
_names_of_joint = [
    find(f"torch.{name}", _FOR_JOINT)
    for name in (
        "distributed.Reducer._rebuild_buckets",
        "distributed.Reducer.prepare_for_forward",
        "distributed.Reducer.prepare_for_backward",
        "nn.parallel.DistributedDataParallel.will_sync_module_buffers",
        "nn.parallel.DistributedDataParallel._sync_buffers",
    )
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


def is_reducible(parallel: DistributedDataParallel) -> bool:
    """Returns whether gradients that a backward has left without a reduction can be averaged as those of any step.

    Not where the reducer must see the backward itself, to find what it does not use, or where its buckets would stand
    beside gradients that otherwise lie in them. Nor where a hook of a parameter would see them twice.
    """
    if None in _names + _names_of_joint or parallel.static_graph or parallel.find_unused_parameters:
        return False
    if parallel.gradient_as_bucket_view or parallel.mixed_precision is not None or hasattr(parallel, "buffer_hook"):
        return False
    parameters, are_sparse = parallel._build_params_for_reducer()
    has_hook = any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in parameters)
    return not (any(are_sparse) or has_hook)


def meet_before_forward(parallel: DistributedDataParallel) -> None:
    """Does what the next forward would do together with other ranks: it makes buckets anew, and buffers equal.

    Source: torch/nn/parallel/distributed.py, `_pre_forward` (2.13).
    """
    if parallel.reducer._rebuild_buckets():
        parallel._has_rebuilt_buckets = True
    if parallel.will_sync_module_buffers():
        parallel._sync_buffers()
        parallel.require_forward_param_sync = False


def reduce_gradients(parallel: DistributedDataParallel) -> None:
    """Averages over ranks, in the reducer's own buckets, the gradients that backward has left without a reduction.

    The reducer takes gradients as it does at the end of accumulation: by a backward, here of zeros without memory of
    their own. Negative ones, which added to a number leave each of its bits.
    Source: torch/nn/parallel/distributed.py, `_pre_forward`, `_post_forward` (2.13).
    """
    with_gradient = [p for p in parallel.module.parameters() if p.requires_grad and p.grad is not None]
    zeros = [torch.full((), -0.0, dtype=p.dtype, device=p.device).expand_as(p) for p in with_gradient]
    parallel.reducer.prepare_for_forward()
    parallel.reducer.prepare_for_backward([])
    torch.autograd.backward(with_gradient, zeros)
    parallel.require_forward_param_sync = True


_kept: set[int] = set()


def keep_groups(model: nn.Module) -> None:
    """Keeps the gloo groups by which a model's gradients are reduced until the process ends, whoever closes them.

    A session knows the model longer than its script, which may close its groups once it has let go of it. A reducer
    that holds its group last waits, with the interpreter locked, for a thread of gloo that needs the lock: one run in a
    hundred never ends (torch 2.13).
    """
    for parallel in (part for part in model.modules() if isinstance(part, DistributedDataParallel)):
        group = parallel.process_group
        if id(group) not in _kept and "gloo" in distributed.get_backend(group):
            _kept.add(id(group))
            # A list of memwall's would let go of it when the interpreter ends, before a model that is known longer.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
