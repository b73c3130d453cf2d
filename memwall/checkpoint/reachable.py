"""Finds objects that a script's variables lead to, under names that another process of the script has as well.

A generator of random numbers is not known to the garbage collector, and two copies of a model are the same to it. A
variable's name tells: those of the functions that are being called, from the script's own on, and its globals.
"""

import inspect
import itertools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

# Modules whose frames lie outside of a script: what has called it.
_CALLERS = ("runpy", "pluggy", "_pytest", "threading", "concurrent")
_HIDDEN = ("torch", "memwall", "contextlib")
_MAX_ITEMS, _MAX_DEPTH, _MAX_FOUND = 64, 5, 20_000
_LOADER_PARTS = ("generator", "sampler", "batch_sampler", "dataset")
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, types.FunctionType, types.ModuleType, Tensor)
_PARTS_OF_MODULES = frozenset(vars(nn.Module()))

_caller: types.FrameType | None = None


def set_caller(frame: types.FrameType | None) -> None:
    """Says which function runs the script: those that have called it are not the script's; None where nobody does."""
    global _caller
    _caller = frame


def reachable() -> Iterator[tuple[str, Any]]:
    """Yields the objects that the calling script can reach by its variables, each once, the nearest first."""
    seen: set[int] = set()
    waiting: deque[tuple[str, Any, int]] = deque()
    for name, values in scopes():
        waiting += ((f"{name}{key}", value, 0) for key, value in values.items() if not key.startswith("__"))
    while waiting and len(seen) < _MAX_FOUND:
        name, value, depth = waiting.popleft()
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen.add(id(value))
        yield name, value
        if depth < _MAX_DEPTH:
            waiting += ((f"{name}{key}", part, depth + 1) for key, part in _parts(value))


def scopes() -> list[tuple[str, dict[str, Any]]]:
    """Returns the variables of the script's functions that are being called, outermost first, and its globals."""
    frame: types.FrameType | None = sys._getframe(1)
    frames: list[types.FrameType] = []
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frames and package in _CALLERS:
            break
        if package not in (*_HIDDEN, *_CALLERS):
            frames.append(frame)
        if frame is _caller:
            break
        frame = frame.f_back
    frames.reverse()
    main: dict[str, Any] = {} if not frames else frames[0].f_globals
    inner = [frame for frame in frames if frame.f_locals is not main]
    return [("", dict(main)), *((f"{frame.f_code.co_name}.", _locals_of(frame)) for frame in inner)]


def _locals_of(frame: types.FrameType) -> dict[str, Any]:
    """Returns the variables of a function that is being called.

    Python before 3.13 makes a dictionary of them that lives as long as the frame: it would keep the tensors of this
    step from being freed when the function gives its variables the next step's.
    """
    made = frame.f_locals
    found = dict(made)
    if type(made) is dict and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        made.clear()
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in itertools.islice(value.items(), _MAX_ITEMS))
    elif isinstance(value, (list, tuple, set)):
        yield from ((f"[{number}]", part) for number, part in enumerate(itertools.islice(value, _MAX_ITEMS)))
    elif isinstance(value, (DataLoader, Sampler)):
        yield from ((f".{key}", getattr(value, key, None)) for key in _LOADER_PARTS)
        if not _is_foreign(type(value).__module__):
            yield from ((f".{key}", part) for key, part in vars(value).items() if key not in _LOADER_PARTS)
    elif isinstance(value, nn.Module):
        for path, module in value.named_modules():
            own = (item for item in vars(module).items() if item[0] not in _PARTS_OF_MODULES)
            yield from ((f".{path}.{key}" if path else f".{key}", part) for key, part in own)
    elif hasattr(value, "__dict__") and not _is_foreign(type(value).__module__):
        yield from ((f".{key}", part) for key, part in vars(value).items())


def _is_foreign(module: str) -> bool:
    """Returns whether a class's module is a library's, whose objects are not searched."""
    top = module.partition(".")[0]
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return top in sys.stdlib_module_names or top in _HIDDEN or "site-packages" in file or "dist-packages" in file
