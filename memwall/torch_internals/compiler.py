"""Compiled modules and functions: how they are known, and ways for memwall's own code to stay out of the compiler.

A module is compiled in one of three ways: `torch.compile(module)` returns a wrapper around it, `module.compile()`
compiles its call in place, and `module.forward = torch.compile(module.forward)` compiles its forward alone. What lies
inside is the compiler's: it traces hooks and forwards that it finds there, so that memwall attaches nothing to it.

Nothing here imports the compiler, which takes seconds; a script that compiles has imported it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from memwall.torch_internals.names import find

_F = TypeVar("_F", bound=Callable[..., Any])

COMPILED_CALL = "_compiled_call_impl"
"""The attribute in which `module.compile()` puts what is called in place of the module's own call."""

COMPILER_ATTRIBUTES = frozenset(
    {COMPILED_CALL, "dynamo_ctx", "get_compiler_config", "_torchdynamo_orig_callable", "_torchdynamo_wrapper_id"}
)
"""Attributes of a compiled module that are the compiler's, and not the module's state."""

CompiledForm = Literal["wrapper", "in place", "forward"]

_region = find("torch._ops.HigherOrderOperator", "recording compiled code")
_REGION_SETTING = "wrap_inductor_compiled_regions"


def compiled_form(module: nn.Module) -> CompiledForm | None:
    """Returns how this very module was compiled; None where it was not, or where this torch marks it otherwise."""
    if hasattr(module, "_orig_mod"):
        return "wrapper"
    if compiled_call_of(module) is not None:
        return "in place"
    if hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable"):
        return "forward"
    return None


def compiled_call_of(module: nn.Module) -> Callable[..., Any] | None:
    """Returns what is called in place of the call of a module that was compiled in place; None of others."""
    found: Callable[..., Any] | None = getattr(module, COMPILED_CALL, None)
    return found


def is_compiled(module: nn.Module) -> bool:
    """Returns whether calls of this very module run code that `torch.compile` made."""
    return compiled_form(module) is not None


def inside_compiled(root: nn.Module) -> Iterator[nn.Module]:
    """Yields the modules that only the compiler calls: those below compiled ones, the root's included."""
    for module in root.modules():
        if is_compiled(module):
            yield from (inner for inner in module.modules() if inner is not module)


def is_region(operator: Any) -> bool:
    """Returns whether an operator stands for a whole function, such as the code of a compiled graph.

    It has no schema, and no formula for its floating-point operations.
    """
    return _region is not None and isinstance(operator, _region)


def has_compiler() -> bool:
    """Returns whether this process has imported the compiler, as it has where something was compiled."""
    return "torch._dynamo" in sys.modules


def num_compiled() -> int:
    """Returns how many functions the compiler was given in this process: an optimizer's step imports it, too."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


@contextmanager
def calls_as_one() -> Iterator[None]:
    """Returns a context in which code is compiled so that whoever records sees a graph's call as one operation.

    It changes nothing where no compiler has been imported, or this torch has no such setting: what such code computes
    for itself is not recorded then.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None or not hasattr(config, _REGION_SETTING):
        yield
        return
    before = getattr(config, _REGION_SETTING)
    setattr(config, _REGION_SETTING, True)
    try:
        yield
    finally:
        setattr(config, _REGION_SETTING, before)


def unseen(function: _F) -> _F:
    """Returns a function that the compiler does not compile, though compiled code calls it: as autograd calls hooks."""
    if not has_compiler():
        return function
    hidden: _F = torch.compiler.disable(function)
    return hidden
