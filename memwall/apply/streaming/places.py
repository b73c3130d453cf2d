"""The places that streamed parameters and gradients are in between their uses: a disk, or the host below a device."""

from typing import Protocol

import torch
from torch import Tensor

from memwall.apply.optimizer_state.pinned import PinnedSpace
from memwall.apply.streaming.resized import ResizedTensor, RoundTripProof
from memwall.store.paged import PagedTensor, WrittenBehind
from memwall.store.room import with_room
from memwall.store.scratch import Slot
from memwall.store.transfer import TransferPool


class Streamed(WrittenBehind, Protocol):
    """Is a tensor whose memory comes and goes while everything that points to it stays; `PagedTensor` says how."""

    @property
    def tensor(self) -> Tensor:
        """Holds the elements while it is here."""

    @property
    def is_here(self) -> bool:
        """Says whether the newest bytes are in memory."""

    @property
    def is_resident(self) -> bool:
        """Says whether it takes memory: it is here, or on its way."""

    @property
    def is_shown(self) -> bool:
        """Says whether it is read by way of the system's cache, see `show`."""

    @property
    def shown_bytes(self) -> int:
        """Counts the memory that the system has filled to `show` it, and can take back."""

    @property
    def slot(self) -> Slot | None:
        """Says where its newest bytes are on disk; None while they are not there."""

    def begin_read(self) -> None:
        """Begins to bring it back, if it is away."""

    def want(self) -> None:
        """Returns once it is here, to stay until `let_go`."""

    def show(self) -> bool:
        """Has its memory read without bringing it back; False where that is not possible."""

    def changed(self) -> None:
        """Says that its elements are about to be written."""

    def overwrite(self) -> None:
        """Does what `want` and `changed` do, for a caller who writes every element."""

    def stay(self) -> None:
        """Stays in memory for good; its place is given back."""

    def forget(self) -> None:
        """Gives up memory and place; the elements are lost."""


class StreamingPlace(Protocol):
    """Makes tensors that can leave for it."""

    device: torch.device
    """Names the memory that they leave."""
    words: str
    waits_in_order: bool
    """Whether who waits goes on at once, and what is launched comes after."""

    @property
    def bytes_written(self) -> int:
        """Counts the bytes that went there so far."""

    @property
    def bytes_read(self) -> int:
        """Counts the bytes that came from there so far."""

    def take(self, tensor: Tensor, label: str) -> Streamed:
        """Returns one with a tensor's elements, which may have taken over its memory."""

    def like(self, tensor: Tensor, label: str) -> Streamed:
        """Returns one with a tensor's dtype, shape and strides, whose elements are yet to be written."""

    def set_proving(self, is_proving: bool) -> None:
        """Has what leaves from now on compared with what comes back, or no longer."""

    def close(self) -> None:
        """Gives up files, threads and memory there."""


class DiskPlace:
    """Is a file below the memory of a CPU.

    Args:
        pool: the threads and the file.
    """

    device = torch.device("cpu")
    waits_in_order = False

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
