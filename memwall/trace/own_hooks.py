"""Hooks on a model that stay with it: what is copied or pickled meanwhile, knows nothing of them."""

import contextlib
from collections.abc import Callable
from typing import Any

__all__ = ["OwnHook"]


class OwnHook:
    """A hook for `register_forward_hook` and its kin, of which a copied or pickled module gets one that does nothing.

    A loop that keeps its best weights by `copy.deepcopy(model)`, or saves by `torch.save(model)`, would take along
    whatever a hook refers to. What it gets is from the standard library: such a file is read without memwall.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return contextlib.nullcontext().__exit__  # takes any arguments and returns None

    def __reduce__(self) -> Any:
        return getattr, (contextlib.nullcontext(), "__exit__")
