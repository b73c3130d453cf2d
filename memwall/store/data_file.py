"""The data of a checkpoint: extents in one file, of which those of the last committed step are never written to.

A bucket that changes is written elsewhere, so it has two extents at most: the committed one and the next one. When the
next step is committed, the space of what it replaced is free.
"""

from collections.abc import Sequence

from memwall.store.backend import ALIGNMENT_BYTES, OpenScratch, SystemBackend, refused
from memwall.store.extents import FreeExtents
from memwall.store.scratch import ScratchFile, Slot


def open_kept(backend: SystemBackend, path: str, *, is_read_only: bool = False) -> OpenScratch:
    """Opens a file of a checkpoint; one that is to be written is created where there is none.

    Raises:
        StoreError: the system refuses, or something else has the name.
    """
    try:
        return backend.open_file(path, is_read_only=is_read_only)
    except OSError as error:
        verb = "read" if is_read_only else "write to"
        raise refused(
            f"the checkpoint's file {path} cannot be opened",
            error,
            path=path,
            advice=f"give a directory that you may {verb} with --checkpoint DIR",
        ) from error


class DataFile(ScratchFile):
    """Keeps the slots of the last committed step, in a `ScratchFile` with a name.

    Args:
        path: the file, created where there is none.
        backend: the operating system, or a test's substitute for it.
        is_read_only: whether it is opened for reading, and has to be there.

    Raises:
        StoreError: the file cannot be opened.
    """

    is_kept = True

    def __init__(self, path: str, *, backend: SystemBackend | None = None, is_read_only: bool = False) -> None:
        self._is_read_only = is_read_only
        backend = backend if backend is not None else SystemBackend()
        # Growing by a little: the space is reserved for the whole run before its first commit.
        super().__init__(path, backend=backend, step_bytes=ALIGNMENT_BYTES)
        self._committed: set[int] = set()
        self._retired: dict[int, Slot] = {}
        self._reserved_bytes = backend.size_bytes(self._fd) // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def _open(self) -> OpenScratch:
        return open_kept(self._backend, self.path, is_read_only=self._is_read_only)

    def adopt(self, slots: Sequence[Slot]) -> None:
        """Says what is in the file: the committed slots; everything else is free. To be called at the start."""
        self._free, self._used_bytes, end = FreeExtents(), 0, 0
        for slot in sorted(slots, key=lambda slot: slot.offset):
            if slot.offset > end:
                self._free.give(end, slot.offset - end)
            end = slot.offset + slot.num_bytes
            self._used_bytes += slot.num_bytes
        if self._reserved_bytes > end:
            self._free.give(end, self._reserved_bytes - end)
        self._committed = {slot.offset for slot in slots}

    def successor(self, slot: Slot | None, num_bytes: int) -> Slot:
        """Returns the slot for what takes the place of `slot`'s contents; a committed slot is left as it is."""
        if slot is None or slot.offset not in self._committed:
            return super().successor(slot, num_bytes)
        self.free(slot)
        return self.allocate(num_bytes)

    def hold(self, slots: Sequence[Slot]) -> None:
        """Says that a step with these slots is being committed: what replaces their contents is written elsewhere."""
        self._committed = self._committed | {slot.offset for slot in slots}

    def free(self, slot: Slot) -> None:
        """Gives a slot back: now, or once another step than the one that it belongs to is committed."""
        if slot.offset in self._committed:
            self._retired[slot.offset] = slot
        else:
            super().free(slot)

    def publish(self, slots: Sequence[Slot]) -> None:
        """Says that a step with these slots is committed, and the one before it no longer needed."""
        self._committed = {slot.offset for slot in slots}
        for offset, slot in list(self._retired.items()):
            if offset not in self._committed:
                del self._retired[offset]
                super().free(slot)

    def sync(self) -> None:
        """Returns once everything written survives a loss of power.

        Raises:
            OSError: the system says that it may not.
        """
        self._backend.sync(self._fd)

    @property
    def has_name(self) -> bool:
        """Says whether the file is still where a resumed run looks for it."""
        return self._backend.has_name(self._fd, self.path)

    @property
    def length_bytes(self) -> int:
        """Is the length that the file has on disk."""
        return self._backend.size_bytes(self._fd)
