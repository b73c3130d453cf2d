"""Where an optimizer's state is between steps: a disk, or what else has buckets."""

from typing import Any, Protocol

import torch

from memwall.store.buckets import Bucket, DiskBucket
from memwall.store.transfer import TransferPool

__all__ = ["DiskSpace", "StateSpace"]


class StateSpace(Protocol):
    """Room for buckets of state."""

    @property
    def kept(self) -> str:
        """Where, as in "on disk"; for messages."""

    @property
    def device(self) -> torch.device:
        """Where the state is while it is used, which is where the parameters are."""

    @property
    def bytes_written(self) -> int:
        """Bytes that have left so far."""

    @property
    def bytes_read(self) -> int:
        """Bytes that have come back so far."""

    def reserve(self, num_bytes: int) -> None:
        """Make sure that there is room.

        Raises:
            StoreError: there is not.
        """

    def bucket(self, label: str) -> Bucket[Any]:
        """A new bucket, which `label` names in an error."""


class DiskSpace:
    """Buckets in a scratch file.

    Args:
        pool: the threads and the file; the caller closes it.
    """

    kept = "on disk"
    device = torch.device("cpu")

    def __init__(self, pool: TransferPool) -> None:
        self._pool = pool

    @property
    def bytes_written(self) -> int:
        """See `StateSpace`."""
        return self._pool.bytes_written

    @property
    def bytes_read(self) -> int:
        """See `StateSpace`."""
        return self._pool.bytes_read

    def reserve(self, num_bytes: int) -> None:
        """See `StateSpace`."""
        self._pool.scratch.reserve(num_bytes)

    def bucket(self, label: str) -> DiskBucket:
        """See `StateSpace`."""
        return DiskBucket(self._pool, label)
