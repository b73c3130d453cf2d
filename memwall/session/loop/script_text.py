"""The text of the script that trains, and what its names stand for meanwhile: it says what is going to be done."""

import ast
import linecache
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import nn

from memwall.checkpoint.reachable import scopes
from memwall.trace.source_lines import user_files

_T = TypeVar("_T")

_MOST_CHARACTERS = 1_000_000


def found_in_text(find: Callable[[ast.AST], Iterator[_T]], *words: str) -> Iterator[tuple[str, _T]]:
    """Yields what is found in the user's files, each with its file's name.

    Args:
        find: looks at a file's text.
        words: of which a file has one, to be looked at.
    """
    for path in user_files():
        text = "".join(linecache.getlines(path))
        if not any(word in text for word in words) or len(text) > _MOST_CHARACTERS:
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # Python has said them when it read the file
                found = list(find(ast.parse(text)))
        except (SyntaxError, ValueError, RecursionError):
            continue  # a notebook's cell with commands of its own, or an expression without end
        yield from ((os.path.basename(path), one) for one in found)


class Names:
    """Knows what names stand for in the script's functions that are being called, the innermost first."""

    def __init__(self) -> None:
        self._scopes = [variables for _, variables in reversed(scopes())]

    def value_of(self, part: ast.AST) -> object:
        """Returns what a name, or an attribute of one, stands for; None where that is not known.

        No attribute is asked for that an object may compute.
        """
        if isinstance(part, ast.Name):
            return next((variables[part.id] for variables in self._scopes if part.id in variables), None)
        if not isinstance(part, ast.Attribute):
            return None
        owner = self.value_of(part.value)
        try:
            parts = object.__getattribute__(owner, "__dict__")
        except AttributeError:
            return None
        modules = parts.get("_modules")
        return parts.get(part.attr, modules.get(part.attr) if isinstance(modules, dict) else None)

    def is_module(self, part: ast.AST) -> bool:
        """Tells whether what a name stands for is a model."""
        return isinstance(self.value_of(part), nn.Module)
