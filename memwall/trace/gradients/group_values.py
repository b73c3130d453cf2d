"""Compares what the groups of an optimizer say beside their parameters, as learning rates, at two moments of a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.autograd import version_of


class GroupValues:
    """Holds the values of an optimizer's groups at one moment."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups = [{key: _Value(value) for key, value in _values(group)} for group in optimizer.param_groups]

    def changed(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns the name of a value that is another one now; "" where none is."""
        return self._first(optimizer, _Value.is_equal)

    def assigned(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns the name of a value that was set since, be it to what it was; "" where none was."""
        return self._first(optimizer, _Value.is_same)

    def _first(self, optimizer: torch.optim.Optimizer, is_still: "Callable[[_Value, Any], bool]") -> str:
        if len(optimizer.param_groups) != len(self._groups):
            return "the number of groups"
        for group, before in zip(optimizer.param_groups, self._groups, strict=True):
            now = dict(_values(group))
            for key in {**before, **now}:
                if key not in before or key not in now or not is_still(before[key], now[key]):
                    return key
        return ""


class _Value:
    def __init__(self, value: Any) -> None:
        self._value = value
        # To look at a device's elements would wait for it.
        self._copy = value.clone() if isinstance(value, Tensor) and value.device.type == "cpu" else None
        self._version = version_of(value) if isinstance(value, Tensor) else 0

    def is_same(self, value: Any) -> bool:
        """Tells whether it is the same object, not written since."""
        return value is self._value and (version_of(value) if isinstance(value, Tensor) else 0) == self._version

    def is_equal(self, value: Any) -> bool:
        """Tells whether it has the same number, or what else it is."""
        if self.is_same(value) and self._copy is None:
            return True
        if isinstance(value, Tensor) or isinstance(self._value, Tensor):
            if self._copy is None or not isinstance(value, Tensor) or value.device.type != "cpu":
                return False
            return bool(torch.equal(value, self._copy))
        return bool(value == self._value)


def _values(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key != "params"]
