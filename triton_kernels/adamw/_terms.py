"""What the two halves of `FusedAdamW` share: the scalars of a step, and how moments are kept in 8 bits."""

from enum import IntEnum
from typing import NamedTuple

from torch import Tensor

__all__ = ["MOMENT_LEVELS", "QUANTISED_ELEMENTS", "ROOT_CEILING", "ROOT_LEVELS", "Moments", "Scalar"]

QUANTISED_ELEMENTS = 256
"""Elements, next to each other in memory, that share a unit."""
MOMENT_LEVELS = 127
"""Of the first moment, int8: rounded to nearest."""
ROOT_LEVELS = 255
"""Of the second moment's root, uint8. The code is the root's own root, so that what is small beside an outlier keeps
digits: rounded to nearest, since what is always rounded up grows from step to step."""
ROOT_CEILING = 16
"""Codes below it are rounded up all the same: an error of theirs would divide by far too little, or by nothing."""


class Scalar(IntEnum):
    """Columns of the table with one row for each parameter."""

    GRADIENT_FACTOR = 0
    """Of clipping, negative to maximise."""
    DECAY = 1
    """1 - lr * weight_decay."""
    FIRST_SHARE = 2
    """1 - beta1."""
    SECOND_DECAY = 3
    """beta2."""
    SECOND_SHARE = 4
    """1 - beta2."""
    STEP_SIZE = 5
    """lr / (1 - beta1^step)."""
    ROOT_FACTOR = 6
    """1 / sqrt(1 - beta2^step)."""
    EPS = 7
    STEP = 8
    """This one's number, from 1."""


class Moments(NamedTuple):
    """State of several parameters, all of one kind."""

    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    exp_avg_units: list[Tensor]
    """[blocks] fp32 for each parameter; none where moments are not quantised."""
    exp_avg_sq_units: list[Tensor]
