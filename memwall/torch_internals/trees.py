"""Nested arguments and results: torch's own trees, which know lists, tuples, dicts and what libraries register.

The module is public by its functions and private by its name; each raises NotAvailableError where it is missing, and
what needs it says so: fake recordings, parameters and gradients on disk, deferred logits.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from memwall.torch_internals.names import function

_FOR = "walking through nested tensors"

tree_flatten = function("torch.utils._pytree.tree_flatten", _FOR)
"""Returns the leaves of nested values, and what puts them together again."""

tree_leaves = function("torch.utils._pytree.tree_leaves", _FOR)
"""Returns the leaves of nested values."""

tree_map = function("torch.utils._pytree.tree_map", _FOR)
"""Returns nested values with a function applied to each leaf."""

tree_map_only = function("torch.utils._pytree.tree_map_only", _FOR)
"""Returns nested values with a function applied to each leaf of a class."""


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors in the lists, tuples and dicts that operators are called with and return."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found
