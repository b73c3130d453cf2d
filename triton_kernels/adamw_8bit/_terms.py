"""How the kernel and its reference keep moments in 8 bits, and the scalars of a step."""

from typing import NamedTuple

from torch import Tensor

BLOCK_ELEMENTS = 256
"""So many elements, next to each other in memory, share a unit."""
MOMENT_LEVELS = 127
"""The first moment is int8, rounded to nearest."""
ROOT_LEVELS = 255
"""The second moment's root is uint8. The code is the root's own root, so that what is small beside an outlier keeps
digits. It is rounded to nearest, since what is always rounded up grows from step to step."""
ROOT_CEILING = 16
"""Codes below this are rounded up all the same: an error of theirs would divide by far too little, or by nothing."""


class Moments(NamedTuple):
    """Holds the moments of one parameter: codes as large as it is, and a unit for each block, 2.03 bytes an element."""

    first: Tensor
    """[elements] int8."""
    root: Tensor
    """[elements] uint8: the root of the code stands for the root of the second moment."""
    first_units: Tensor
    """[blocks] fp32."""
    root_units: Tensor


class Scalars(NamedTuple):
    """Holds what a step multiplies with; all are rounded to fp32."""

    decay: float
    """1 - lr * weight_decay."""
    first_share: float
    """1 - beta1."""
    second_decay: float
    """beta2."""
    second_share: float
    """1 - beta2."""
    step_size: float
    """lr / (1 - beta1^step)."""
    root_factor: float
    """1 / sqrt(1 - beta2^step)."""
    eps: float
