"""The order in which ranks sum gradients, which a run that goes on keeps from its first step on.

DistributedDataParallel sums the gradients of its first step in buckets of its own choice, and those of all others in
the order in which the first step had them. A new process would do its first step in the first order again, and sums of
more than two ranks would round otherwise than those of a run that was not interrupted.
"""

import logging
import weakref
from collections.abc import Sequence

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from memwall.checkpoint.discovery import objects_of
from memwall.torch_internals.reducer import buckets_of, make_buckets
from memwall.torch_internals.sharding import standing_parameters

_log = logging.getLogger(__name__)

Buckets = list[list[str]]
"""Names each bucket's parameters, of a model that is wrapped."""


class TakenBuckets:
    """Takes down the buckets of a run, which stay what they are once its second step has begun."""

    def __init__(self) -> None:
        self._parallels: list[weakref.ref[DistributedDataParallel]] | None = None
        self._taken: list[Buckets] = []

    def of(self, model: nn.Module, restored: Sequence[Buckets]) -> Sequence[Buckets]:
        """Returns the buckets of what wraps the model, or parts of it; [] where nothing does, or none stand yet.

        Args:
            restored: those with which a run that goes on has begun, and which it will make anew.
        """
        if self._parallels is None:
            self._parallels = [weakref.ref(parallel) for parallel in _parallels()]
        if not self._taken and self._parallels:
            names = {id(parameter): name for name, parameter in standing_parameters(model).items()}
            here = [parallel for parallel in (one() for one in self._parallels) if parallel is not None]
            self._taken = [
                [[names[id(parameter)] for parameter in bucket] for bucket in buckets_of(parallel)]
                for parallel in here
                if all(id(parameter) in names for parameter in parallel.parameters())
            ]
            self._taken = [buckets for buckets in self._taken if buckets]
        return self._taken or restored


def restore_buckets(model: nn.Module, taken: Sequence[Buckets]) -> None:
    """Has what wraps the model begin with the buckets that the interrupted run had."""
    parameters = standing_parameters(model)
    for parallel in _parallels() if taken else ():
        trained = {id(parameter) for parameter in parallel.parameters() if parameter.requires_grad}
        for buckets in taken:
            order = [[parameters[name] for name in bucket if name in parameters] for bucket in buckets]
            is_its = {id(parameter) for bucket in order for parameter in bucket} == trained
            if is_its and make_buckets(parallel, order):
                _log.info("gradients are summed in the %d buckets of the interrupted run", len(order))


def _parallels() -> list[DistributedDataParallel]:
    is_divided = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 2
    return objects_of((DistributedDataParallel,)) if is_divided else []
