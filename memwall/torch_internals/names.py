"""Looks torch's private names up, once each, and remembers what they are needed for.

`REGISTRY` grows as the other modules of this package are imported; the tests go through it.
"""

import importlib
import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from memwall.errors import NotAvailableError

_TESTED = "2.13.0"


class Name(NamedTuple):
    """Names something private of torch."""

    path: str
    """Path from the top-level package on, e.g. "torch._C._current_autograd_node"."""
    needed_for: str
    """Says what is not available without it: the subject of the error's sentence."""
    is_on_instances: bool = False
    """Whether only objects have it, so that it is looked up at each of them."""


REGISTRY: dict[str, Name] = {}
"""All names looked up so far, by path."""


def error(name: Name) -> NotAvailableError:
    """Returns what is raised where a name is missing."""
    return NotAvailableError(
        f"{name.needed_for} is not available with torch {torch.__version__}, which has no {name.path}; take torch "
        f"{_TESTED}, with which memwall is tested, or leave out what needs it",
        name=name.path,
    )


def find(path: str, needed_for: str) -> Any:
    """Returns what a path names; None where this torch lacks it."""
    REGISTRY.setdefault(path, Name(path, needed_for))
    return _walk(path)


def function(path: str, needed_for: str) -> Callable[..., Any]:
    """Returns torch's own function, at no cost per call; one that raises `NotAvailableError` where it is missing."""
    found = find(path, needed_for)
    return _raising(Name(path, needed_for)) if found is None else found  # type: ignore[no-any-return]


def kind(path: str, needed_for: str, base: type = object) -> Any:
    """Returns torch's own class; where it is missing one without instances, whose making raises `NotAvailableError`.

    Args:
        base: what the class derives from, where that matters: an exception is caught by its class.
    """
    found = find(path, needed_for)
    if found is None:
        found = type(path.rpartition(".")[2], (base,), {"__init__": _raising(Name(path, needed_for))})
    return found


def attribute(path: str, needed_for: str) -> Callable[[Any], Any]:
    """Returns what reads an attribute of an object; it raises `NotAvailableError` where the class has none.

    Args:
        path: of the attribute on the class, or on an object that all others are like.
    """
    if find(path, needed_for) is None:
        return _raising(Name(path, needed_for))
    return operator.attrgetter(path.rpartition(".")[2])


def method(path: str, needed_for: str) -> Callable[[Any], Any]:
    """Returns what calls a method without arguments; it raises `NotAvailableError` where the class has none."""
    if find(path, needed_for) is None:
        return _raising(Name(path, needed_for))
    return operator.methodcaller(path.rpartition(".")[2])


def instance_attribute(path: str, needed_for: str) -> Callable[[Any], Any]:
    """Returns what reads an attribute that only objects have; it raises `NotAvailableError` at one that has none."""
    name = REGISTRY[path] = Name(path, needed_for, is_on_instances=True)
    last = path.rpartition(".")[2]

    def read(owner: Any) -> Any:
        try:
            return getattr(owner, last)
        except AttributeError:
            raise error(name) from None

    return read


def _raising(name: Name) -> Callable[..., NoReturn]:
    def missing(*_: Any, **__: Any) -> NoReturn:
        raise error(name)

    return missing


def _walk(path: str) -> Any:
    """Follows attributes where there are such, else modules; None where neither is there."""
    first, *rest = path.split(".")
    here = first
    found: Any = importlib.import_module(first)
    for part in rest:
        here = f"{here}.{part}"
        found = getattr(found, part, None)
        if found is None:
            try:
                found = importlib.import_module(here)
            except ImportError:
                return None
    return found
