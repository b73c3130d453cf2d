"""The places that streamed parameters and gradients are in between their uses: a disk, or the host below a device."""

import torch
from torch import Tensor

from memwall.apply.optimizer_state.pinned import PinnedSpace
from memwall.apply.streaming.resized import ResizedTensor, RoundTripProof
from memwall.store.paged import PagedTensor
from memwall.store.room import with_room
from memwall.store.transfer import TransferPool

Streamed = PagedTensor | ResizedTensor
"""Is a tensor whose memory comes and goes while everything that points to it stays."""


class DiskPlace:
    """Is a file below the memory of a CPU.

    Args:
        pool: the threads and the file.
    """

    device = torch.device("cpu")
    waits_in_order = False
    """Whether who waits goes on at once, and what is launched comes after."""

    def __init__(self, pool: TransferPool) -> None:
        self.pool = pool
        self.words = f"on disk in {pool.scratch.path}"

    @property
    def bytes_written(self) -> int:
        """Counts the bytes given to the disk so far."""
        return self.pool.bytes_written

    @property
    def bytes_read(self) -> int:
        """Counts the bytes fetched from the disk so far."""
        return self.pool.bytes_read

    def take(self, tensor: Tensor, label: str) -> PagedTensor:
        """Returns a copy in pages of its own."""
        paged = self.like(tensor, label)
        paged.tensor.copy_(tensor)
        return paged

    def like(self, tensor: Tensor, label: str) -> PagedTensor:
        """Returns one in pages of its own."""
        return PagedTensor(self.pool, tensor, label)

    def set_proving(self, is_proving: bool) -> None:
        """Does nothing: each block has a checksum, always."""

    def close(self) -> None:
        """Closes the file, and ends the threads."""
        self.pool.close()


class HostPlace:
    """Is pinned host memory below a CUDA device's; see `PinnedSpace` for the order of its copies.

    Args:
        device: the parameters'.
        limit_bytes: the most to pin.
    """

    words = PinnedSpace.place
    waits_in_order = True

    def __init__(self, device: torch.device, *, limit_bytes: int) -> None:
        self.device = device
        self._space = PinnedSpace(device, limit_bytes=limit_bytes)
        self._proof = RoundTripProof()

    @property
    def pinned_bytes(self) -> int:
        """Counts the bytes that are pinned now."""
        return self._space.pinned_bytes

    def set_limit(self, limit_bytes: int) -> None:
        """Sets the most to pin."""
        self._space.set_limit(limit_bytes)

    @property
    def bytes_written(self) -> int:
        """Counts the bytes that left the device so far."""
        return self._space.bytes_written

    @property
    def bytes_read(self) -> int:
        """Counts the bytes that came to the device so far."""
        return self._space.bytes_read

    def take(self, tensor: Tensor, label: str) -> ResizedTensor:
        """Returns one over the tensor's own memory: the device may have no room for a copy."""
        return ResizedTensor(self._space, tensor, label, self._proof)

    def like(self, tensor: Tensor, label: str) -> ResizedTensor:
        """Returns one in memory of its own."""
        return ResizedTensor(self._space, with_room(lambda: torch.empty_like(tensor)), label, self._proof)

    def set_proving(self, is_proving: bool) -> None:
        """Has what leaves the device from now on compared with what comes back, or no longer."""
        self._proof.is_on = is_proving

    def close(self) -> None:
        """Unpins the memory."""
        self._space.close()


StreamingPlace = DiskPlace | HostPlace
"""Makes tensors that can leave for it, each a `Streamed`."""
