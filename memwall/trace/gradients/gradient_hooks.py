"""memwall's own hooks on gradients, told from those of others: they change no gradient and need none to stay."""

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from memwall.torch_internals.autograd import accumulation_hooks


class OwnHook:
    """Calls a method when a gradient is accumulated, for as long as its object lives.

    torch holds such hooks where Python's collector does not look: one that held its object, which holds the optimizer,
    would hold the parameter that it hangs on.

    Args:
        method: a bound one; called with the parameter.
    """

    def __init__(self, method: Callable[[torch.Tensor], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, parameter: torch.Tensor) -> None:
        method = self._method()
        if method is not None:
            method(parameter)


def keeps_graph(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a call of `torch.autograd.backward` with these arguments leaves its graph to another backward."""
    return any(args[2:4]) or bool(kwargs.get("retain_graph") or kwargs.get("create_graph"))


def has_foreign_hook(parameter: torch.Tensor) -> bool:
    """Returns whether somebody else's hook runs when the parameter's gradient is accumulated."""
    return any(not isinstance(hook, OwnHook) for hook in accumulation_hooks(parameter).values())
