"""A CUDA tensor whose memory is given back to the allocator and filled again, while everything that points there stays.

Its storage is the same object throughout, with a memory of size zero while it is away: views of it, autograd's saved
tensors among them, share that object and are valid whenever it `is_here`. As everywhere below a device (`pinned`), the
host never waits: to wait for a copy is to have the compute stream wait for it. So memory goes back to the allocator, in
the order of that stream, after the last copy from it or into it.
"""

import torch
from torch import Tensor

from memwall.apply.blocks.digests import Digest, difference, digest_of
from memwall.apply.optimizer_state.pinned import PinnedSpace, StreamCopy
from memwall.errors import NotExactError
from memwall.store.pinned_arena import PinnedSlot
from memwall.store.room import with_room
from memwall.store.scratch import Slot
from memwall.torch_internals.dispatch import without_dispatch_modes


class RoundTripProof:
    """Says whether what leaves from now on is compared with what comes back, once."""

    is_on = False


class ResizedTensor:
    """Keeps a CUDA tensor, with a slot in pinned host memory; `PagedTensor` says what each name promises.

    Args:
        space: the host memory, and the streams to it and from it.
        tensor: fills a storage of its own, which nothing else resizes. A write to it is seen by no graph.
        label: names it in an error.
        proof: whether it is to prove itself.
    """

    is_shown = False
    shown_bytes = 0
    slot: Slot | None = None

    def __init__(self, space: PinnedSpace, tensor: Tensor, label: str, proof: RoundTripProof) -> None:
        self._space, self.tensor, self._label, self._proof = space, tensor, label, proof
        self._left: Digest | None = None
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.is_here = True
        """Says whether the newest bytes are in memory, for what is launched from now on."""
        self.is_stored = False
        """Says whether the newest bytes are in host memory, or on their way there."""
        self._is_wanted = True
        self._place: PinnedSlot | None = None
        self._read: StreamCopy | None = None
        self._write: StreamCopy | None = None

    @property
    def is_resident(self) -> bool:
        """Says whether it takes memory: it is here, or on its way."""
        return self.is_here or self._read is not None

    @property
    def is_written(self) -> bool:
        """Says whether no write of it holds its memory; what a clock decides is not asked, so that runs are alike."""
        return self._write is None

    def begin_read(self) -> None:
        """Begins to bring it back, if it is away.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        if not self.is_here and self._read is None:
            assert self._place is not None
            self._resize(self.num_bytes)
            with without_dispatch_modes():
                self._read = self._space.copy_in(self._place, self._bytes(), None)

    def want(self) -> None:
        """Has what is launched from now on find it here, to stay until `let_go`.

        Raises:
            NotExactError: it is not what left.
        """
        self._is_wanted = True
        self.begin_read()
        self._end_read()
        if not self.is_here and self._left is not None:
            left, self._left = self._left, None
            if difference([left], [digest_of(self.tensor)]):
                raise NotExactError(
                    action="parameters in host memory", found=f"{self._label} came back different from what left"
                )
        self.is_here = True

    def show(self) -> bool:
        """Returns False: no system fills a device's memory as it is read."""
        return False

    def changed(self) -> None:
        """Says that its elements are about to be written, after a write under way."""
        self._settle()
        self.is_stored = False

    def overwrite(self) -> None:
        """Does what `want` and `changed` do, for a caller who writes every element: nothing is read."""
        self._end_read()
        self.changed()
        if self.tensor.untyped_storage().nbytes() == 0:
            self._resize(self.num_bytes)
        self._is_wanted = self.is_here = True

    def begin_write(self) -> None:
        """Begins to write it out; its elements must not change until `changed` says they will.

        Raises:
            StoreError: the host has no room.
        """
        self._left = digest_of(self.tensor) if self._proof.is_on else None
        self._place = self._space.successor(self._place, self.num_bytes)
        with without_dispatch_modes():
            self._write = self._space.copy_out(self._place, [(self._bytes(), 0)])
        self.is_stored = True

    def let_go(self) -> None:
        """Gives up the memory: now, or after a write under way, in `finish_write`."""
        self._is_wanted = False
        if self.is_stored and self._write is None:
            self._drop()

    def finish_write(self) -> None:
        """Has what is launched from now on come after the write under way; gives up memory that nobody wants."""
        self._settle()
        if self.is_stored and not self._is_wanted:
            self._drop()

    def stay(self) -> None:
        """Stays in memory for good: the place in host memory is given back."""
        self.want()
        self.changed()
        self._give_place_back()

    def forget(self) -> None:
        """Gives up memory and place; the elements are lost. It can be used again through `overwrite`."""
        self._settle()
        self._is_wanted = self.is_stored = False
        self._drop()
        self._give_place_back()

    def _drop(self) -> None:
        self._end_read()
        self.is_here = False
        self._resize(0)

    def _end_read(self) -> None:
        if self._read is not None:
            self._read.wait()
            self._read = None

    def _settle(self) -> None:
        if self._write is not None:
            self._write.wait()
            self._write = None

    def _give_place_back(self) -> None:
        if self._place is not None:
            self._space.free(self._place)
            self._place = None

    def _resize(self, num_bytes: int) -> None:
        storage = self.tensor.untyped_storage()
        with_room(lambda: storage.resize_(num_bytes))  # no operation, which would be repeated by itself

    def _bytes(self) -> Tensor:
        """Returns its memory as bytes, with a version of its own: graphs that saved it see no write."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        return nothing.set_(self.tensor.untyped_storage(), 0, (self.num_bytes,), (1,))
