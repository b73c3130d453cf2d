"""Says what the arguments of an operator hold: tensors, however deep, those that it writes into, and integers."""

from collections.abc import Iterable, Mapping, Sequence
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


def batch_shape(values: Iterable[Any]) -> tuple[int, ...]:
    """Returns the shape of the first tensor in a model's arguments that has any; () where there is none.

    A list of several tensors with as many dimensions each, as the images that a detector is called with, counts like
    one tensor: what they are padded to.
    """
    for value in values:
        if isinstance(value, Tensor):
            shape = tuple(local_part(value).shape)
        elif isinstance(value, (list, tuple)):
            shape = _padded(value) or batch_shape(value)
        elif isinstance(value, Mapping):
            shape = batch_shape(value.values())
        else:
            shape = batch_shape(vars(value).values()) if hasattr(value, "__dataclass_fields__") else ()
        if shape:
            return shape
    return ()


def _padded(samples: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of samples that are put together, each as large as the largest; () where they cannot be."""
    if len(samples) < 2 or not all(isinstance(each, Tensor) for each in samples):
        return ()
    shapes = [tuple(each.shape) for each in samples]
    are_alike = len(shapes[0]) > 0 and all(len(shape) == len(shapes[0]) for shape in shapes)
    return (len(shapes), *map(max, zip(*shapes, strict=True))) if are_alike else ()


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
