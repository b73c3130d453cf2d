"""Optimizers and schedulers: the order of step hooks, how state is begun, schedulers inside of others."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memwall.torch_internals.names import find, instance_attribute

_FOR = "an optimizer's step taken over by memwall (its state elsewhere, or fewer bits)"

step_pre_hooks: Callable[[torch.optim.Optimizer], OrderedDict[int, Any]] = instance_attribute(
    "torch.optim.Optimizer._optimizer_step_pre_hooks", _FOR
)
"""Returns an optimizer's own step pre-hooks by number, in the order in which they run; moving one changes the order.

Raises NotAvailableError at an optimizer without them.
"""

step_post_hooks: Callable[[torch.optim.Optimizer], OrderedDict[int, Any]] = instance_attribute(
    "torch.optim.Optimizer._optimizer_step_post_hooks", _FOR
)
"""Returns an optimizer's own step post-hooks by number, in the order in which they run; moving one changes the order.

Raises NotAvailableError at an optimizer without them.
"""

find("torch.optim.SGD._init_group", "telling whether a class derived from torch's optimizers begins its state in a way")


def group_initialiser_of(kind: type) -> Any:
    """Returns the method by which a class of optimizers begins the state of its parameters; None if it has none.

    Without it two classes are compared by their steps alone.
    """
    return getattr(kind, "_init_group", None)


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """Returns the schedulers that one consists of (`ChainedScheduler`, `SequentialLR`); none for any other.

    Without the attribute each is found by itself, and saved twice.
    """
    found: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return found
