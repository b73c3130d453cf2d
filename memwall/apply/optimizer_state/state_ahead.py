"""How much of the optimizer's state may be in memory before the optimizer runs."""

from msgspec import Struct

__all__ = ["StateAhead"]


class StateAhead(Struct, frozen=True, kw_only=True):
    """From one gradient of a step on, so much of the optimizer's state may be in memory before the optimizer runs."""

    after_gradients: int
    """Counted as parameters get them, from 1."""
    buffer_bytes: int
    """Of buffers, together with those of earlier gradients."""
