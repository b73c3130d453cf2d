"""A module's forward, wrapped for as long as memwall is at work; copies of the module get a plain one."""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from memwall.errors import ApplyError

__all__ = ["wrap_forward"]


def wrap_forward(module: nn.Module, run: Callable[..., Any], name: str) -> Callable[[], None]:
    """Puts a forward on this one module that calls `run(original, *args, **kwargs)`.

    Returns:
        What gives the module its forward back.

    Raises:
        ApplyError: the module takes none, as scripted ones; `name` is what it is called.
    """
    original, was_own = module.forward, "forward" in module.__dict__
    try:
        module.forward = _WrappedForward(module, original, run)
    except Exception as error:
        raise ApplyError(f"the forward of '{name}' ({type(module).__name__}) cannot be wrapped: {error}") from error

    def undo() -> None:
        if was_own:
            module.forward = original
        else:
            del module.__dict__["forward"]

    return undo


class _WrappedForward:
    """A copy of the module, and a pickled one, gets its own plain forward instead."""

    def __init__(self, module: nn.Module, original: Callable[..., Any], run: Callable[..., Any]) -> None:
        self._module, self._run = module, run
        self.__wrapped__ = original  # its signature is this one's (inspect.signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.__wrapped__, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce__(self) -> Any:
        if isinstance(self.__wrapped__, MethodType):
            return getattr, (self._module, "forward")  # of the new module, which has none of its own yet
        return copy.copy, (self.__wrapped__,)
