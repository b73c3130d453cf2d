"""Tells tensors that an operation saves first and writes then: their bytes are not to leave before that."""

import sys
from typing import Any

from torch.nn import functional

_RRELU = functional.rrelu.__code__
_MOST_FRAMES = 4
"""Most frames from the operation to who asks: hooks of one engine, and what watches them."""


def is_filled_later() -> bool:
    """Returns whether the operation that saves a tensor now writes into it afterwards: no version counter sees that.

    `rrelu` saves the noise that it has yet to draw.
    """
    frame: Any = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        frame = frame.f_back
        if frame is None:
            return False
        if frame.f_code is _RRELU:
            return True
    return False
