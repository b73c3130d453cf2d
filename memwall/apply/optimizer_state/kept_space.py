"""Disk space that outlives the process, while a run is committed: what lives on disk anyway is written there.

Then a commit has nothing to write of it: it names the extents that the last step has written.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from memwall.store.buckets import DiskBucket
from memwall.store.scratch import Slot
from memwall.store.transfer import TransferPool

__all__ = ["KeepsBuckets", "KeepsParameters", "KeepsState", "KeptSpace", "kept_space", "set_kept_space"]


class KeepsState(Protocol):
    """What has an optimizer's state elsewhere than in memory, or in another form."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose state it is."""

    def keeps_low_bits(self, parameter: Tensor) -> bool:
        """Whether the moments of this parameter are in 8 bits."""

    def fill(self, load: Callable[[Sequence[Tensor]], None]) -> None:
        """Takes over the state of another process, a few parameters' at a time, which `load` puts in its place."""


class KeepsBuckets(KeepsState, Protocol):
    """What has an optimizer's state on disk."""

    @property
    def buckets(self) -> list[DiskBucket]:
        """What is on disk between two steps."""


class KeepsParameters(Protocol):
    """What has a model's parameters on disk."""

    def stored(self) -> list[tuple[nn.Parameter, Slot, int]]:
        """Each with where its newest elements are, and how many bytes they take there."""


class KeptSpace:
    """The data file of a checkpoint, and who else writes to it."""

    def __init__(self, pool: TransferPool) -> None:
        self.pool = pool
        self.tenant: KeepsBuckets | None = None
        self.parameters: KeepsParameters | None = None
        self.low_bit: KeepsState | None = None
        """What has state in 8 bits. That lies in memory."""

    def keeper_of(self, optimizer: torch.optim.Optimizer) -> KeepsState | None:
        """What takes over state of this optimizer from another process."""
        every = (self.tenant_of(optimizer), self.low_bit)
        return next((one for one in every if one is not None and one.optimizer is optimizer), None)

    def tenant_of(self, optimizer: torch.optim.Optimizer) -> KeepsBuckets | None:
        """What has state of this optimizer on disk."""
        return None if self.tenant is None or self.tenant.optimizer is not optimizer else self.tenant


_present: KeptSpace | None = None


def kept_space() -> KeptSpace | None:
    """The space of this process's run, if it is committed."""
    return _present


def set_kept_space(space: KeptSpace | None) -> None:
    """Says where state that moves to disk from now on is to be."""
    global _present
    _present = space
