"""Knows how a model is divided among ranks, and with it how a part of a step runs that may fail on one of them."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memwall.checkpoint.discovery import objects_of
from memwall.errors import RankError
from memwall.torch_internals.reducer import is_reducible, meet_before_forward, reduce_gradients
from memwall.torch_internals.sharding import (
    are_resettable,
    gradient_syncs,
    is_sharding_unit,
    meeting_before_collectives,
    reset_step,
    with_gradient_syncs,
)
from memwall.trace.records import Trace

_T = TypeVar("_T")

_OF_REPLICAS = ("c10d.broadcast_",)
"""Collectives in a forward that are those of DistributedDataParallel: it makes buffers equal."""
_OF_SHARDS = ("c10d._allgather_base_",)
_COLLECTIVES = ("c10d.", "_c10d_functional.", "c10d_functional.")


class _Replicas:
    """Has a DistributedDataParallel reduce gradients when a part has ended well on all ranks."""

    def __init__(self, parallel: DistributedDataParallel) -> None:
        self._parallel = weakref.ref(parallel)

    def begin(self) -> tuple[bool, bool]:
        """Returns how a part begins now: its loop may reduce gradients with another part."""
        parallel = self._present
        return parallel.require_backward_grad_sync, parallel.require_forward_param_sync

    def reduces(self, begin: tuple[bool, bool]) -> bool:
        """Returns whether a part that began like that reduces gradients."""
        return begin[0]

    def run(self, part: Callable[[], _T], begin: tuple[bool, bool], meet: Callable[[], None]) -> _T:
        """Runs a part, which began like that, up to where it has failed on this rank or has not."""
        parallel = self._present
        _, parallel.require_forward_param_sync = begin
        meet_before_forward(parallel)
        with parallel.no_sync():
            return part()

    def end(self, begin: tuple[bool, bool]) -> None:
        """Ends a part that has failed on no rank."""
        if begin[0]:
            reduce_gradients(self._present)

    def reset(self) -> None:
        """Does nothing: the reducer has not seen the part."""

    @property
    def _present(self) -> DistributedDataParallel:
        parallel = self._parallel()
        if parallel is None:
            raise RankError("the DistributedDataParallel around the model is gone, and ranks cannot average gradients")
        return parallel


class _Shards:
    """Has ranks say before each collective of `fully_shard` whether one of them has failed."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def begin(self) -> Any:
        return gradient_syncs(self._root)

    def reduces(self, begin: Any) -> bool:
        """Says so of all parts: each gathers parameters, so that ranks have equally many."""
        return True

    def run(self, part: Callable[[], _T], begin: Any, meet: Callable[[], None]) -> _T:
        with meeting_before_collectives(self._root, meet), with_gradient_syncs(self._root, begin):
            return part()

    def end(self, begin: Any) -> None:
        """Does nothing: backward has reduced the gradients."""

    def reset(self) -> None:
        """Leaves nothing of a part that has failed."""
        reset_step(self._root)


Divided = _Replicas | _Shards
"""Knows how a model is divided among ranks."""


def divided_as(model: nn.Module, trace: Trace) -> Divided | None:
    """Returns how a model is divided; None where ranks wait for each other in ways that are not known here."""
    names = {trace.names[op.name] for step in trace.steps for op in step.ops if op.phase == "forward"}
    met = [name for name in names if name.startswith(_COLLECTIVES)]
    divided: Divided | None = None
    if is_sharding_unit(model):
        divided = _Shards(model) if are_resettable(model) and _are(met, _OF_SHARDS) else None
    elif _are(met, _OF_REPLICAS):
        parallel = _around(model)
        divided = None if parallel is None else _Replicas(parallel)
    return divided


def _are(names: Sequence[str], known: tuple[str, ...]) -> bool:
    return all(name.startswith(known) for name in names)


def _around(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the one DistributedDataParallel that has all that is trained of a model, where it can reduce later."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    around: list[tuple[DistributedDataParallel, set[int]]] = [
        (parallel, {id(parameter) for parameter in parallel.parameters()})
        for parallel in objects_of((DistributedDataParallel,))
    ]
    found = [(parallel, covered) for parallel, covered in around if covered & trained]
    if len(found) != 1 or not trained <= found[0][1] or not is_reducible(found[0][0]):
        return None
    return found[0][0]
