"""Changes single values of a JSON or MessagePack file, so that what is behind its decoding is reached."""

import math
import random
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["mutated"]

_VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 255, -(1 << 31), 1 << 31, (1 << 62), (1 << 63) - 1, -(1 << 63)),
    *(0.0, -1.0, 1e-300, 1e300, math.inf, math.nan),
    *("", "a" * 300, "\x1b[31m", "../../x", "layers.0", None, True, [], {}),
)


def mutated(data: bytes, draw: random.Random, otherwise: Callable[[bytes], bytes]) -> bytes:
    """Returns a file that differs in one to three values, or in bytes where it is neither kind of file."""
    for form in (msgspec.json, msgspec.msgpack):
        try:
            value = form.decode(data)
            encode = form.encode
            break
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
    else:
        return otherwise(data)
    if draw.random() < 0.1:
        return otherwise(data)
    for _ in range(draw.randrange(1, 4)):
        value = _changed(value, draw)
    try:
        return encode(value)
    except (msgspec.EncodeError, OverflowError, TypeError):
        return otherwise(data)


def _changed(value: Any, draw: random.Random) -> Any:
    """Returns the value with one place in it changed: replaced, doubled, left out, or moved a little."""
    if isinstance(value, (list, dict)) and value and draw.random() < 0.95:
        key = draw.choice(range(len(value)) if isinstance(value, list) else list(value))
        kind = draw.random()
        if kind < 0.9:
            value[key] = _changed(value[key], draw)
        elif isinstance(value, dict) or kind < 0.95:
            del value[key]
        else:
            value.insert(key, value[key])
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and draw.random() < 0.4:
        return value + draw.choice((-1, 1, 7)) if value == value else 0
    return draw.choice(_VALUES)
