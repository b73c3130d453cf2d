"""A call's arguments as tensors and the rest, so that what is done for positional tensors is done for all of them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class CallArguments:
    """Holds what a block is called with; tensors may lie in tuples, lists and dicts, in any depth.

    torch's checkpoint saves the tensors that it is given by position, and looks at their devices for the random states
    to be restored; those given by keyword, or in another one's list, it does not know of.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        """Each once, in the order of the arguments; to be dropped by whoever keeps this for later."""
        places: dict[int, _Place] = {}

        def without(tensor: Any) -> Any:
            place = places.get(id(tensor))
            if place is None:
                place = places[id(tensor)] = _Place(len(self.tensors))
                self.tensors.append(tensor)
            return place

        self._rest = _mapped((args, kwargs), Tensor, without)

    def filled(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments with these tensors, in containers of their own that hold what they held at first."""
        filled: tuple[tuple[Any, ...], dict[str, Any]] = _mapped(
            self._rest, _Place, lambda place: tensors[place.number]
        )
        return filled


class _Place:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, kind):
        return change(value)
    if type(value) is dict:
        return {name: _mapped(item, kind, change) for name, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, kind, change) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # Not by its constructor, which may look at the tensors, as that of a PackedSequence does.
        return tuple.__new__(type(value), (_mapped(item, kind, change) for item in value))
    return value
