"""Answers what each step asks of a model's parameters, without a walk over its modules: that takes 0.1 ms by itself."""

from collections.abc import Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, TypeVar

import torch
from torch import nn

from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.modules import own_modules, own_parameters

_T = TypeVar("_T")

_takes_gradients = attrgetter("requires_grad")
_is_there = partial(is_not, None)


class Layers:
    """Holds the modules of a model, and finds them anew once one was added, taken away, or put in another's place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._find()

    def trained(self) -> tuple[bool, ...]:
        """Returns of each parameter whether it takes gradients, as often as modules have it."""
        if any(self._leaves) or any(self._bare) or _values(self._modules) != self._found:
            self._find()
        with without_subclass_functions():  # to look at parameters on disk does not bring them in
            return tuple(map(_takes_gradients, filter(_is_there, _values(self._parameters))))

    @property
    def device(self) -> torch.device:
        """Returns where the first parameter is; the CPU without one."""
        for own in self._parameters:
            for one in own.values():
                if one is not None:
                    return one.device
        return torch.device("cpu")

    def _find(self) -> None:
        modules = list(self.model.modules())
        # Most modules have parameters or modules of their own, not both: what is empty is asked for that alone.
        self._parameters, self._bare = _told_apart(own_parameters(module) for module in modules)
        self._modules, self._leaves = _told_apart(own_modules(module) for module in modules)
        self._found = _values(self._modules)


def _told_apart(dicts: Iterable[dict[str, _T]]) -> tuple[list[dict[str, _T]], list[dict[str, _T]]]:
    """Returns those that have something, and those that are empty."""
    full: list[dict[str, _T]] = []
    empty: list[dict[str, _T]] = []
    for each in dicts:
        (full if each else empty).append(each)
    return full, empty


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))
