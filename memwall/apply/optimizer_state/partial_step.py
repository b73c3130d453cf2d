"""An optimizer's own step on some of its parameters: which optimizers allow it, and how it is done.

It changes nothing where each parameter is updated from its own gradient, state and group alone. That is a property of
the optimizer's class, so the classes are named (`trace.optimizers.STEPPED_ALONE`) and no others are taken: those
of torch.optim, and Lion of lion-pytorch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.errors import ApplyError
from memwall.torch_internals.optimizers import group_initialiser_of
from memwall.torch_internals.sharding import is_sharded
from memwall.trace.optimizers import STEPPED_ALONE, known_class

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Says what a step is called with, by position and by name."""
Part = Sequence[tuple[int, list[Tensor]]]
"""Lists parameters by the number of the group they are in."""

_CPU = torch.device("cpu")


def inner_step_of(
    optimizer: torch.optim.Optimizer, *, kept: str = "on disk", device: torch.device = _CPU
) -> Callable[..., Any]:
    """Returns the step below the hooks, of an optimizer that may be stepped a few parameters at a time.

    Args:
        kept: where its state is to be between steps, for messages.
        device: where all its parameters are to be.

    Raises:
        ApplyError: it may not, or is not known to.
    """
    kind: Any = type(optimizer)
    if not is_stepped_alone(kind):
        raise ApplyError(
            f"the state of {kind.__module__}.{kind.__qualname__} cannot be kept {kept}: memwall steps a few "
            "parameters at a time, which is known to change nothing for torch.optim's "
            f"{', '.join(sorted(STEPPED_ALONE - {'Lion'}))} and lion-pytorch's Lion alone; use one of these, "
            "or plan without moving optimizer state"
        )
    inner = below_hooks(kind.step)
    if getattr(inner, "hooked", False):
        raise ApplyError(
            f"{kind.__qualname__}.step was replaced by a wrapper around it, which would run once for every bucket of "
            "state; wrap the step of the optimizer object in place of its class, or register a step hook"
        )
    values = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
    if any(isinstance(value, Tensor) and value.layout is not torch.strided for value in values):
        raise ApplyError(
            f"{kind.__qualname__} keeps sparse tensors as its state, which cannot be {kept}; plan without moving "
            "optimizer state"
        )
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise ApplyError(
                f"a differentiable {kind.__qualname__} keeps its state in the graph, so it cannot be {kept}; "
                "pass differentiable=False"
            )
        for parameter in group["params"]:
            if is_sharded(parameter):
                raise ApplyError(
                    f"{kind.__qualname__} trains DTensors, as fully_shard and tensor parallelism make them: their "
                    f"state is divided among the ranks already, and cannot be {kept} besides"
                )
            if parameter.device != device:
                whose = "CPU parameters" if device == _CPU else f"parameters on {device}"
                raise ApplyError(
                    f"{kind.__qualname__} trains parameters on {parameter.device}; its state is kept {kept} for {whose}"
                    " only; plan for this device without that"
                )
    return inner


def step_some(
    optimizer: torch.optim.Optimizer, inner: Callable[..., Any], part: Part | None, arguments: Arguments
) -> None:
    """Steps these parameters only, without hooks. The optimizer sees its own group dictionaries, with fewer members."""
    if not part:
        return
    whole = optimizer.param_groups
    chosen = [whole[number] for number, _ in part]
    members = [group["params"] for group in chosen]
    try:
        for group, (_, some) in zip(chosen, part, strict=True):
            group["params"] = some
        optimizer.param_groups = chosen
        inner(optimizer, *arguments[0], **arguments[1])
    finally:
        optimizer.param_groups = whole
        for group, every in zip(chosen, members, strict=True):
            group["params"] = every


def with_closure_called(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns a step's arguments, as its hooks get them, with a closure that returns the loss it has just computed.

    The first of `args` is the optimizer (torch.optim.Optimizer.profile_hook_step).
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return args, kwargs
    with torch.enable_grad():
        loss = closure()

    def computed() -> Any:
        return loss

    if len(args) > 1:
        return (args[0], computed, *args[2:]), kwargs
    return args, {**kwargs, "closure": computed}


def without_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Returns a step's arguments, as its hooks get them, without the optimizer and the closure, which was called."""
    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return ((None, *args[2:]) if len(args) > 1 else ()), rest


def is_stepped_alone(kind: Any) -> bool:
    """Returns whether it is one of the classes named, or inherits its step from one."""
    known: Any = known_class(kind)
    return (
        known is not None
        and known.__name__ in STEPPED_ALONE
        and below_hooks(kind.step) is below_hooks(known.step)
        and group_initialiser_of(kind) is group_initialiser_of(known)
    )


def below_hooks(step: Any) -> Callable[..., Any]:
    """Returns what torch wrapped in the code that calls step hooks (`Optimizer.profile_hook_step`)."""
    inner: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return inner
