"""Attaches hooks and forwards to a module while memwall is at work; copies of that module get nothing of it.

A loop may keep its best weights by `copy.deepcopy(model)`, or save by `torch.save(model)`. Both ask the module for its
state, by `__getstate__`; a module that something is attached to answers as if nothing were. Such a file needs no
memwall to be loaded, nor anything that a `weights_only` load would not take.

Of a module that was compiled in place the compiler would trace hooks and forward; there what is attached stands before
the compiled call (`compiled_call`).
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memwall.errors import ApplyError
from memwall.patches import Patch, Patches
from memwall.torch_internals.compiler import compiled_form
from memwall.trace.compiled_call import CompiledCall

_ASKED = "__getstate__"
_TABLES_OF_CALLS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def attach_hook(register: Callable[..., RemovableHandle], hook: Callable[..., Any], **options: Any) -> Patch:
    """Registers a hook that copies of the module do not get.

    Args:
        register: a module's method for it, as `model.register_forward_hook`.
        options: for that method.
    """
    module: nn.Module = register.__self__  # type: ignore[attr-defined]
    if compiled_form(module) == "in place" and register.__name__ in CompiledCall.HOOKS:
        return CompiledCall.before(module).hook(register.__name__, hook, why=_purpose_of(hook), **options)
    attached = _Hook(hook)
    handle = register(attached, **options)
    _hide(module)

    def undo() -> None:
        handle.remove()
        attached.is_over = True
        _show(module)

    where = f"{type(module).__name__}.{register.__name__}"
    return Patch("hook", where, why=_purpose_of(hook), undo=undo, owner=module)


def forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns what a call of the module runs after its hooks: its forward, or what was compiled in place."""
    if compiled_form(module) == "in place":
        return CompiledCall.run_of(module)
    routed = vars(module).get("forward")
    return routed.__wrapped__ if isinstance(routed, _Routed) else module.forward


def own_forward_of(module: nn.Module) -> Callable[..., Any]:
    """Returns the forward that a module has without what is attached to it."""
    forward = forward_of(module)
    while isinstance(forward, _Forward):
        forward = forward.__wrapped__
    return forward


def wrap_forward(
    module: nn.Module, run: Callable[..., Any], name: str, *, is_innermost: bool = False
) -> Callable[[], None]:
    """Puts a forward on this one module that calls `run(original, *args, **kwargs)`; copies have the original.

    Args:
        is_innermost: it lies within what is attached already, which goes on to see each call.

    Returns:
        What gives the module its forward back.

    Raises:
        ApplyError: the module takes none, as scripted ones; `name` is what it is called.
    """
    if compiled_form(module) == "in place":
        return CompiledCall.before(module).wrap(run, why=_purpose_of(run))
    own = vars(module).get("forward")
    while is_innermost and isinstance(own, _Forward) and isinstance(own.__wrapped__, _Forward):
        own = own.__wrapped__
    patches = Patches(_purpose_of(run))
    try:
        # What is wrapped lies within a routed call, and has the hooks before it.
        if isinstance(own, _Forward if is_innermost else _Routed):
            forward = _Forward(own.__wrapped__, run, was_own=own.was_own)
            forward.patch = patches.replace(own, "__wrapped__", forward)
        else:
            forward = _Forward(module.forward, run, was_own=own is not None)
            forward.patch = patches.replace(module, "forward", forward)
    except Exception as error:
        raise ApplyError(f"the forward of '{name}' ({type(module).__name__}) cannot be wrapped: {error}") from error
    _hide(module)

    def undo() -> None:
        patches.undo()
        _show(module)

    return undo


def has_hooks(module: nn.Module) -> bool:
    """Tells whether calls of a module run hooks that are not memwall's."""
    tables = (vars(module).get(name, {}) for name in _TABLES_OF_CALLS)
    return any(not isinstance(hook, _Hook) for hooks in tables for hook in hooks.values())


def call_where_forward_is_called(module: nn.Module) -> Patch:
    """Has `module.forward(x)` run what `module(x)` runs, so that hooks hear of it; copies have the original.

    Nothing else changes as long as nobody but memwall has hooks there: then its forward is called alone, as it was.
    """
    forward = _Routed(module)
    patches = Patches("has hooks called in a loop that calls a model's forward itself")
    forward.patch = patches.replace(module, "forward", forward)
    patches.push(attach_hook(module.register_forward_pre_hook, forward.enter))
    _hide(module)

    def undo() -> None:
        patches.undo()
        _show(module)

    return Patch("forward", f"{type(module).__name__}.forward", why=_purpose_of(forward.enter), undo=undo, owner=module)


def _purpose_of(function: Callable[..., Any]) -> str:
    """Returns what is called, as whoever reads the list of changes finds it in the code."""
    while isinstance(function, partial):
        function = function.func
    return f"calls {function.__module__}.{function.__qualname__}"


class _Hook:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.is_over = False
        """Whether it was taken away: a call whose hooks were collected before calls it once more, without options."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_over or torch.compiler.is_compiling():  # called by compiled code: what the compiler makes of it
            return None
        return self._function(*args, **kwargs)


class _Forward:
    def __init__(self, original: Callable[..., Any], run: Callable[..., Any], *, was_own: bool) -> None:
        self._run, self.was_own = run, was_own
        self.patch: Patch | None = None
        self.__wrapped__ = original  # its signature is this one's (inspect.signature)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_over = self.patch is not None and self.patch.is_over  # somebody else has wrapped it in turn
        if is_over or torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        return self._run(self.__wrapped__, *args, **kwargs)


class _Routed(_Forward):
    """Stands outermost: what is wrapped later comes between it and the module's own forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.forward, self._run_call, was_own="forward" in vars(module))
        self._module = weakref.ref(module)
        self._is_entered = False

    def enter(self, *_: Any) -> None:
        """Notes, from the hook before it, that the forward that comes next is that of a call."""
        self._is_entered = True

    def _run_call(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        is_entered, self._is_entered = self._is_entered, False
        module = self._module()
        if is_entered or module is None or has_hooks(module):
            return original(*args, **kwargs)
        return module(*args, **kwargs)


def _hide(module: nn.Module) -> None:
    """Leaves what is attached out of the module's state from now on."""
    vars(module)[_ASKED] = lambda: _state_of(module)


def _show(module: nn.Module) -> None:
    """Hides nothing any more once nothing is attached."""
    own = vars(module)
    if not _hook_numbers(own) and not isinstance(own.get("forward"), _Forward):
        own.pop(_ASKED, None)


def _state_of(module: nn.Module) -> Any:
    state = type(module).__getstate__(module)
    if isinstance(state, tuple):  # of a class with slots
        return (_without_attached(state[0]), *state[1:])
    return _without_attached(state)


def _without_attached(state: Any) -> Any:
    if not isinstance(state, dict):  # a class that says itself what its state is
        return state
    numbers = _hook_numbers(state)
    clean = {name: value for name, value in state.items() if name != _ASKED}
    for name, hooks in _hook_tables(clean):
        if not numbers.isdisjoint(hooks):
            clean[name] = type(hooks)((number, hook) for number, hook in hooks.items() if number not in numbers)
    while isinstance(forward := clean.get("forward"), _Forward):
        if forward.was_own:
            clean["forward"] = forward.__wrapped__
        else:
            del clean["forward"]
    return clean


def _hook_numbers(state: Mapping[str, Any]) -> set[int]:
    """Returns the numbers of attached hooks; a hook has the same number in all tables of its module."""
    return {number for _, hooks in _hook_tables(state) for number, hook in hooks.items() if isinstance(hook, _Hook)}


def _hook_tables(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Hooks by number, and what is noted of them (`_forward_hooks_with_kwargs` and others)."""
    return [(name, value) for name, value in state.items() if "_hooks" in name and isinstance(value, dict)]
