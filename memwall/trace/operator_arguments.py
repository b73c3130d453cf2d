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
            tensors_among(_fields_of(value), found)
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
            shape = batch_shape(_fields_of(value)) if hasattr(value, "__dataclass_fields__") else ()
        if shape:
            return shape
    return ()


def _fields_of(value: Any) -> list[Any]:
    """Returns what the fields of a dataclass hold, which need not have a dictionary."""
    return [getattr(value, name, None) for name in value.__dataclass_fields__]


def _padded(samples: Sequence[Any]) -> tuple[int, ...]:
    """Returns the shape of samples that are put together, each as large as the largest; () where they are none.

    Integers of one size are tokens and their mask.
    """
    if len(samples) < 2 or not all(isinstance(each, Tensor) for each in samples):
        return ()
    shapes = [tuple(each.shape) for each in samples]
    is_one_each = len(set(shapes)) > 1 or samples[0].is_floating_point()
    are_alike = is_one_each and len({len(shape) for shape in shapes}) == 1 and len(shapes[0]) > 0
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
