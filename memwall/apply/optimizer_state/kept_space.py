"""Disk space that outlives the process, while a run is committed: what lives on disk anyway is written there.

Then a commit has nothing to write of it: it names the extents that the last step has written. Of other runs it is in
scratch files.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from memwall.machine.disk_location import check_directory, default_directory
from memwall.store.buckets import DiskBucket
from memwall.store.scratch import ScratchFile, Slot
from memwall.store.transfer import TransferPool


class KeepsState(Protocol):
    """Has an optimizer's state elsewhere than in memory, or in another form."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Names the optimizer whose state it is."""

    @property
    def is_on_disk(self) -> bool:
        """Says whether it may write to the checkpoint's file at any time."""

    @property
    def buckets(self) -> Sequence[DiskBucket]:
        """Lists what is on disk between two steps."""

    def keeps_low_bits(self, parameter: Tensor) -> bool:
        """Returns whether the moments of this parameter are in 8 bits."""

    def fill(self, load: Callable[[Sequence[Tensor]], None]) -> None:
        """Takes over the state of another process, a few parameters' at a time, which `load` puts in its place."""


class KeepsParameters(Protocol):
    """Has a model's parameters on disk."""

    def stored(self) -> list[tuple[nn.Parameter, Slot, int]]:
        """Returns each with where its newest elements are, and how many bytes they take there."""


class KeptSpace:
    """Holds the data file of a checkpoint, and lists who else writes to it."""

    def __init__(self, pool: TransferPool) -> None:
        self.pool = pool
        self.states: list[KeepsState] = []
        self.parameters: KeepsParameters | None = None

    @property
    def is_used(self) -> bool:
        """Says whether somebody has something there that has not come back into memory."""
        return self.parameters is not None or any(state.is_on_disk for state in self.states)

    def keeper_of(self, optimizer: torch.optim.Optimizer) -> KeepsState | None:
        """Returns what has state of this optimizer; None if it lies in memory as torch has it."""
        return next((one for one in self.states if one.optimizer is optimizer), None)


_present: KeptSpace | None = None


def kept_space() -> KeptSpace | None:
    """Returns the space of this process's run, if it is committed."""
    return _present


def set_kept_space(space: KeptSpace | None) -> None:
    """Says where state that moves to disk from now on is to be."""
    global _present
    _present = space


def open_scratch_pool(disk: str | None, capacity_bytes: int | None) -> TransferPool:
    """Returns threads over a new scratch file.

    Args:
        disk: directory; None for the default one.
        capacity_bytes: the most to take there; None leaves only the disk's own limit.

    Raises:
        StoreError: the directory is missing, read-only, full, or a RAM disk.
    """
    directory = disk if disk is not None else default_directory()
    check_directory(directory)
    return TransferPool(ScratchFile(directory, capacity_bytes=capacity_bytes))
