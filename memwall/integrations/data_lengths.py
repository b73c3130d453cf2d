"""Looks once, before training, for the longest sample of a run's data, which a plan may have been made without.

A plan made from the first step holds for batches no longer than that one. A longer sample that comes late is the usual
reason why a run that fitted for hours ends.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from torch import Tensor, nn

from memwall.trace.attached import attach_hook

__all__ = ["LengthWatch", "LongestSample", "longest_sample"]

_log = logging.getLogger(__name__)

MOST_SECONDS = 5.0
"""Data sets that make each sample when it is asked for may take minutes."""
_FIELD = "input_ids"


class LongestSample(Struct, frozen=True, kw_only=True):
    """Holds the longest of the samples that were looked at."""

    length: int
    """Tokens."""
    number: int
    """Counted from 1, in the order of the data set."""
    num_read: int
    num_samples: int
    """Samples of the data set; more than were read where reading took too long."""


def longest_sample(dataset: Any, *, most_seconds: float = MOST_SECONDS) -> LongestSample | None:
    """Looks at every sample's `input_ids`; None for data that cannot be indexed, or whose samples have none."""
    try:
        num_samples = len(dataset)
        column = dataset.select_columns([_FIELD]) if _FIELD in getattr(dataset, "column_names", ()) else dataset
    except TypeError:
        return None
    until = time.monotonic() + most_seconds
    longest = number = num_read = 0
    for index in range(num_samples):
        sample = column[index]
        tokens = sample.get(_FIELD) if isinstance(sample, Mapping) else None
        if tokens is None:
            return None
        length = tokens.shape[-1] if isinstance(tokens, Tensor) else len(tokens)
        if length > longest:
            longest, number = length, index + 1
        num_read += 1
        if time.monotonic() > until:
            break
    if not num_read:
        return None
    return LongestSample(length=longest, number=number, num_read=num_read, num_samples=num_samples)


class LengthWatch:
    """Sees how long the batches are that a plan is made from; `compare` says if the data have longer ones.

    Args:
        model: as it is called by the training loop.
        longest: of the data.
    """

    def __init__(self, model: nn.Module, longest: LongestSample) -> None:
        self.longest, self.length = longest, 0
        self._handle = attach_hook(model.register_forward_pre_hook, self._before_forward, with_kwargs=True)

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        tokens = kwargs.get(_FIELD)
        if isinstance(tokens, Tensor):
            self.length = max(self.length, tokens.shape[-1])

    def compare(self) -> None:
        """Looks no further, and warns if the plan, which stands now, was made from shorter batches."""
        self.close()
        longest = self.longest
        if not 0 < self.length < longest.length:
            return
        part = "" if longest.num_read == longest.num_samples else f" of the {longest.num_read} that were looked at"
        _log.warning(
            "the plan was made from batches of %d tokens a sample; sample %d of %d%s has %d, at least %.1f times as "
            "many, and the step it comes in will need more memory than foreseen. Group the samples by length, which "
            "puts the longest batch first, or cut them",
            self.length,
            longest.number,
            longest.num_samples,
            part,
            longest.length,
            longest.length / self.length,
        )

    def close(self) -> None:
        """Looks no further."""
        self._handle.undo()
