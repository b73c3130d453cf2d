"""Values that a forward may change, as they were: tensors, containers, generators."""

import collections
import operator
import random
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.autograd import version_of

MAX_CLONED_BYTES = 1 << 20
"""A larger tensor that forward writes into is not remembered: there may be one in each block."""

_GENERATORS = (torch.Generator, random.Random)


class HeldTensor:
    """Holds a tensor that forward may write into, and what it held before."""

    __slots__ = ("before", "key", "name", "owner", "tensor", "version")

    def __init__(self, owner: Any, key: Any, tensor: Tensor, name: str) -> None:
        self.owner, self.key, self.tensor, self.name = owner, key, tensor, name
        self.version = version_of(tensor)
        self.before = tensor.detach().clone() if tensor.nbytes <= MAX_CLONED_BYTES else None

    def hold_again(self) -> None:
        """Holds what the tensor holds now."""
        version = version_of(self.tensor)
        if version != self.version:
            self.version = version
            self.before = self.tensor.detach().clone() if self.before is not None else None

    def put_back(self) -> None:
        """Writes into the tensor what it held, and puts it where it was."""
        if self.before is not None and version_of(self.tensor) != self.version:
            self.tensor.copy_(self.before)
            self.version = version_of(self.tensor)
        self.owner[self.key] = self.tensor


def is_generator(value: Any) -> bool:
    """Returns whether a value is a generator of random numbers with a state: torch's, Python's or numpy's."""
    if isinstance(value, _GENERATORS):
        return not isinstance(value, random.SystemRandom)  # which the system's noise comes from
    return type(value).__name__ in ("Generator", "RandomState") and type(value).__module__.startswith("numpy.random")


def refill(live: Any, copied: Any) -> None:
    """Gives a container what it held; whoever holds it sees that."""
    live.clear()
    if isinstance(live, (list, collections.deque)):
        live.extend(copied)
    else:
        live.update(copied)


def holds_the_same(live: Any, copied: Any) -> bool:
    """Returns whether a container holds the very objects that it held."""
    if len(live) != len(copied):
        return False
    if isinstance(live, dict):
        return all(key in live and live[key] is value for key, value in copied.items())
    return live == copied if isinstance(live, set) else all(map(operator.is_, live, copied))


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two states of a generator are the same."""
    if one is other:
        return True
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool((one == other).all()) if hasattr(one, "all") else bool(one == other)
