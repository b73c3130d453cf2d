"""Variables outside of a block that its forward may change: those that its code names, and what hooks inside it use.

A forward that runs twice would append to a global list twice, as would a hook that collects activations for the loss,
and draw from a generator twice that is a global variable, or one of the function in which its class is defined.
"""

import dis
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

_OTHERS = ("torch", "memwall")
"""Packages whose code is not the user's."""


class Variable(NamedTuple):
    """Gives access to a variable by what reads and what binds it."""

    read: Callable[[], Any]
    bind: Callable[[Any], None]


def variables_of_code(modules: Sequence[nn.Module]) -> list[Variable]:
    """Returns the variables outside that methods of the modules' classes name, or functions of the same package do."""
    classes = {base for module in modules for base in type(module).__mro__ if not _is_foreign(base)}
    waiting = [function for kind in classes for function in vars(kind).values() if _is_code(function)]
    packages = {_package_of(function) for function in waiting}
    seen, found = set(waiting), []
    while waiting:
        function = waiting.pop()
        for variable in (*_globals_of(function), *_enclosing_of(function)):
            value = variable.read()
            if not _is_code(value):
                found.append(variable)
            elif value not in seen and _package_of(value) in packages:
                seen.add(value)
                waiting.append(value)
    return found


def variables_of_hooks(modules: Sequence[nn.Module]) -> Iterator[Variable]:
    """Yields the variables that hooks around the modules' forwards were defined beside, and the globals they name."""
    for function in _hooks(modules):
        if _is_code(function):
            yield from _enclosing_of(function)
            yield from _globals_of(function)


def hook_owners(modules: Sequence[nn.Module]) -> Iterator[Any]:
    """Yields the objects whose methods are hooks around the modules' forwards."""
    for function in _hooks(modules):
        if isinstance(function, types.MethodType):
            yield function.__self__


def hook_tables(modules: Sequence[nn.Module]) -> list[dict[int, Any]]:
    """Returns where the modules have the hooks around their forwards."""
    names = ("_forward_pre_hooks", "_forward_hooks")
    return [vars(module)[name] for module in modules for name in names if name in vars(module)]


def _hooks(modules: Sequence[nn.Module]) -> Iterator[Any]:
    for table in hook_tables(modules):
        for function in table.values():
            while isinstance(function, functools.partial):
                function = function.func
            if not _is_foreign(function):
                yield function


def _globals_of(function: types.FunctionType) -> list[Variable]:
    names = function.__globals__
    found = [name for name in _global_names(function.__code__) if name in names]
    return [Variable(functools.partial(names.get, name), functools.partial(names.__setitem__, name)) for name in found]


def _enclosing_of(function: types.FunctionType) -> Iterator[Variable]:
    for cell in function.__closure__ or ():
        yield Variable(functools.partial(_content, cell), functools.partial(setattr, cell, "cell_contents"))


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    used = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))
    return tuple(dict.fromkeys(used))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _is_code(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _package_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _is_foreign(value: Any) -> bool:
    return _package_of(value) in _OTHERS
