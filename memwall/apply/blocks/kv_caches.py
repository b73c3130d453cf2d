"""Key-value caches that a recomputed block is called with: each run gets a copy of its own."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from memwall.errors import ApplyError


class OwnCaches:
    """Hands a block copies of the caches that it is called with.

    Args:
        module: the block.
    """

    def __init__(self, module: nn.Module) -> None:
        indices: set[Any] = {getattr(child, "layer_idx", None) for child in module.modules()}
        self._layers = sorted(int(index) for index in indices if isinstance(index, int))

    def emptied(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
        """Returns a call in which no run sees what another one puts into a cache.

        Raises:
            ApplyError: a cache already holds positions.
        """
        if not any(map(_is_cache, (*args, *kwargs.values()))):
            return forward, args, kwargs

        def with_own(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._unfilled(args, kwargs)
            return forward(*args, **kwargs)

        return with_own, *self._unfilled(args, kwargs)

    def _unfilled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            tuple(_unfilled(value, self._layers) for value in args),
            {name: _unfilled(value, self._layers) for name, value in kwargs.items()},
        )


def _is_cache(value: Any) -> bool:
    """Returns whether a value is a key-value cache of transformers (its Cache classes share these names)."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _unfilled(value: Any, layers: Sequence[int]) -> Any:
    """Returns a copy of a key-value cache without the keys and values in it; any other value as it is.

    A block extends the cache it is given, so each run gets a copy of its own: training does not read what comes out.
    The copy takes the same operations as the cache, and holds no other layer's tensors until backward.

    Args:
        layers: indices of the layers that the block consists of; () if it does not say.
    """
    if not _is_cache(value):
        return value
    num_positions = max(_num_positions(value, layer) for layer in layers or (0,))
    if num_positions > 0:
        raise ApplyError(
            f"a block to be recomputed was called with a key-value cache that already holds {num_positions} positions "
            "for it, as generation does; call the model without past_key_values when training"
        )
    return _emptied(value)


def _num_positions(cache: Any, layer: int) -> int:
    try:
        return int(cache.get_seq_length(layer))
    except ValueError:  # transformers: a layer without positions, such as one of linear attention
        return 0


def _emptied(cache: Any) -> Any:
    own = copy.copy(cache)
    for name, value in vars(cache).items():
        if _is_cache(value):
            setattr(own, name, _emptied(value))
        elif isinstance(value, dict):
            setattr(own, name, dict(value))
        elif isinstance(value, list):
            setattr(own, name, [_emptied_layer(layer) for layer in value])
    return own


def _emptied_layer(layer: Any) -> Any:
    own = copy.copy(layer)
    for name, value in list(vars(own).items()) if hasattr(own, "__dict__") else ():
        if isinstance(value, Tensor):
            setattr(own, name, None)
    if hasattr(own, "is_initialized"):
        own.is_initialized = False
    return own
