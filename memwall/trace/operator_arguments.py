"""Says what the arguments of an operator hold: tensors, however deep, those that it writes into, and integers."""

from typing import Any

from torch import Tensor

from memwall.torch_internals.operators import written_places
from memwall.torch_internals.sharding import local_part


def tensors_among(values: Any, found: list[Tensor]) -> list[Tensor]:
    """Collects tensors from the nesting that operator arguments have: tuples, lists, dicts; of a DTensor its part."""
    for value in values:
        if isinstance(value, Tensor):
            found.append(local_part(value))
        elif isinstance(value, (list, tuple)):
            tensors_among(value, found)
        elif isinstance(value, dict):
            tensors_among(value.values(), found)
        elif hasattr(value, "__dataclass_fields__"):
            tensors_among(vars(value).values(), found)
    return found


def written_among(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator writes into, besides those that it makes."""
    written = [args[place] for place, _ in written_places(func) if place < len(args)]
    if "out" in kwargs:
        written.append(kwargs["out"])
    return tensors_among(written, []) if written else []


def numbers_among(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the integers among an operator's arguments, alone and in lists: sizes, dimensions, strides."""
    return tuple(
        tuple(value) if isinstance(value, (list, tuple)) else value
        for value in args
        if isinstance(value, int) or (isinstance(value, (list, tuple)) and all(isinstance(each, int) for each in value))
    )
