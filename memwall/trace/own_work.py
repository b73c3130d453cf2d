"""What operators do inside, where a trace cannot see into them.

Operators of torch are known by name (`predict.cuda.workspaces`). Whoever defines others says it here, for a device that
is not at hand: on fake tensors nothing can be measured.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["OWN_WORK", "OwnWork", "Part", "own_work_of"]


class Part(NamedTuple):
    """One kernel of several that an operator runs, one after the other."""

    moved_bytes: int
    flops: int


class OwnWork(NamedTuple):
    """One call's share."""

    workspace_bytes: int = 0
    """At its own peak, beyond arguments and results."""
    parts: tuple[Part, ...] = ()
    """All of its kernels; () for one that reads its arguments and writes its results."""
    dtype: str = ""
    """That products are computed in, e.g. "bfloat16"; "" for that of the first floating-point argument."""


OWN_WORK: dict[Any, Callable[..., OwnWork]] = {}
"""By operator; called with its arguments."""

_NONE = OwnWork()


def own_work_of(func: Any, args: tuple[Any, ...]) -> OwnWork:
    """Of one call; nothing where nobody has said."""
    formula = OWN_WORK.get(func)
    return _NONE if formula is None else formula(*args)
