"""One scratch file, cut into slots: the disk space that offloaded bytes borrow and give back within a step."""

import errno
import os
import threading
from dataclasses import dataclass, field

from memwall.errors import OffloadIOError, StoreError
from memwall.store.backend import DISK_FULL, OpenScratch, SystemBackend, read_fully, refused, round_up, write_fully
from memwall.store.closing import Closing
from memwall.store.extents import FreeExtents
from memwall.store.page_map import PageMap
from memwall.units import format_bytes

_OUT_OF_SPACE = DISK_FULL | {errno.EFBIG}


@dataclass(slots=True, eq=False)
class Slot:
    """Names a piece of a scratch file: `num_bytes` (a multiple of 4096) at `offset`."""

    offset: int
    num_bytes: int
    checksums: dict[int, int] = field(default_factory=dict)
    """Has the crc32 of each block that was written, by its offset within the slot; the writer fills it."""
    may_change: bool = False
    """Says whether others may write into the memory while it is written; a checksum that differs is theirs."""
    is_torn: bool = False
    """Says whether they did, so that nobody knows what is here."""


class ScratchFile(Closing):
    """Owns a file without a name, which grows by reservation and never shrinks until it is closed.

    A slot is handed out only when its bytes exist on disk, so a write into it cannot run out of space. Safe to use
    from several threads.

    Args:
        directory: where; see `memwall.machine.disk_location.check_directory`.
        backend: the operating system, or a test's substitute for it; by default the engine of the directory's disk.
        capacity_bytes: the most to take from the disk; None leaves only the disk's own limit.
        step_bytes: how much to reserve at a time.

    Raises:
        StoreError: the file cannot be created.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        backend: SystemBackend | None = None,
        capacity_bytes: int | None = None,
        step_bytes: int = 64 << 20,
    ) -> None:
        self.path = os.fspath(directory)
        self._backend = backend if backend is not None else SystemBackend()
        self._capacity_bytes = capacity_bytes
        self._step_bytes = round_up(step_bytes)
        self._free = FreeExtents()
        self._lock = threading.Lock()
        self._reserved_bytes = 0
        self._used_bytes = 0
        self._is_closed = False
        opened = self._open()
        self._fd = opened.fd
        self.is_direct = opened.is_direct

    is_kept = False
    """Says whether the file outlives the process: a checkpoint's."""

    def _open(self) -> OpenScratch:
        try:
            return self._backend.open_scratch(self.path)
        except OSError as error:
            raise refused(
                f"no scratch file can be created in {self.path}",
                error,
                path=self.path,
                advice="give a writable directory on a local disk with --disk DIR",
            ) from error

    @property
    def system_fd(self) -> int | None:
        """Is the file for who moves bytes past this object; None where they are moved another way, or leave traces."""
        return self._fd if type(self._backend) is SystemBackend and self.is_direct and not self._is_closed else None

    @property
    def place(self) -> str:
        """Says what the file is called in an error."""
        return self.path if self.is_kept else f"the scratch file in {self.path}"

    @property
    def option(self) -> str:
        """Is the option of the command line that another directory is given with."""
        return "--checkpoint" if self.is_kept else "--disk"

    @property
    def used_bytes(self) -> int:
        """Counts the bytes in slots that were handed out and not freed."""
        return self._used_bytes

    @property
    def reserved_bytes(self) -> int:
        """Is the file's size: bytes taken from the disk."""
        return self._reserved_bytes

    def reserve(self, num_bytes: int) -> None:
        """Takes disk space ahead, so that a run that lacks it fails before its first step.

        Raises:
            StoreError: `num_bytes` in all cannot be had; names what is needed, what is free, and where.
        """
        with self._lock:
            if num_bytes > self._reserved_bytes:
                self._grow(round_up(num_bytes) - self._reserved_bytes, at_least_bytes=None)

    def allocate(self, num_bytes: int) -> Slot:
        """Returns a slot that holds `num_bytes`.

        Raises:
            StoreError: the disk or the limit has no room; nothing was written and no other slot is touched.
        """
        size = round_up(num_bytes)
        with self._lock:
            offset = self._free.take(size)
            if offset is None:
                missing = size - self._free.tail_bytes(self._reserved_bytes)
                self._grow(max(missing, self._step_bytes), at_least_bytes=missing)
                offset = self._free.take(size)
            if offset is None:
                raise StoreError(f"{format_bytes(size)} were reserved in {self.path} but are not free")
            self._used_bytes += size
        return Slot(offset, size)

    def successor(self, slot: Slot | None, num_bytes: int) -> Slot:
        """Returns the slot for what takes the place of `slot`'s contents: the same one where it is large enough.

        Raises:
            StoreError: the disk or the limit has no room.
        """
        if slot is not None and slot.num_bytes < num_bytes:
            self.free(slot)
            slot = None
        return slot if slot is not None else self.allocate(num_bytes)

    def free(self, slot: Slot) -> None:
        """Gives a slot back; its bytes may be overwritten at once."""
        with self._lock:
            self._free.give(slot.offset, slot.num_bytes)
            self._used_bytes -= slot.num_bytes

    def write(self, slot: Slot, slot_offset: int, data: memoryview, label: str) -> None:
        """Writes `data` into the slot; see `write_fully`."""
        self._check_range(slot, slot_offset, len(data))
        offset = slot.offset + slot_offset
        write_fully(self._backend, self._fd, data, offset, path=self.path, label=label, is_kept=self.is_kept)
        if not self.is_direct:
            self._backend.forget(self._fd, offset, len(data))

    def read(self, slot: Slot, slot_offset: int, buffer: memoryview, label: str) -> None:
        """Fills `buffer` from the slot; see `read_fully`."""
        self._check_range(slot, slot_offset, len(buffer))
        offset = slot.offset + slot_offset
        read_fully(self._backend, self._fd, buffer, offset, path=self.path, label=label, is_kept=self.is_kept)
        if not self.is_direct:
            self._backend.forget(self._fd, offset, len(buffer))

    def show(self, slot: Slot, pages: PageMap) -> bool:
        """Has a map show the slot's first bytes, see `PageMap`."""
        self._check_range(slot, 0, pages.num_bytes)
        return pages.show(self._fd, slot.offset)

    def close(self) -> None:
        """Returns everything to the disk. Slots become invalid."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._backend.close(self._fd)

    def _check_range(self, slot: Slot, slot_offset: int, num_bytes: int) -> None:
        if self._is_closed:
            raise StoreError(f"{self.place} is closed")
        if slot_offset < 0 or slot_offset + num_bytes > slot.num_bytes:
            raise StoreError(f"bytes [{slot_offset}, {slot_offset + num_bytes}) lie outside a slot of {slot.num_bytes}")

    def _grow(self, wanted_bytes: int, *, at_least_bytes: int | None) -> None:
        """Reserves `wanted_bytes` more, or only `at_least_bytes` where the disk or the limit has no more."""
        needed_bytes = wanted_bytes if at_least_bytes is None else at_least_bytes
        if self._is_closed:
            raise StoreError(f"{self.place} is closed")
        if self._capacity_bytes is not None:
            room_bytes = (self._capacity_bytes - self._reserved_bytes) // round_up(1) * round_up(1)
            if needed_bytes > room_bytes:
                raise self._limit_error(needed_bytes)
            wanted_bytes = min(wanted_bytes, room_bytes)
        for num_bytes in dict.fromkeys((wanted_bytes, needed_bytes)):
            try:
                self._backend.reserve(self._fd, self._reserved_bytes, num_bytes)
            except OSError as error:
                if error.errno in _OUT_OF_SPACE and num_bytes > needed_bytes:
                    continue
                raise self._space_error(needed_bytes, error) from error
            self._free.give(self._reserved_bytes, num_bytes)
            self._reserved_bytes += num_bytes
            return

    def _limit_error(self, needed_bytes: int) -> StoreError:
        return StoreError(
            f"{format_bytes(needed_bytes)} more of disk are needed in {self.path}, but of its limit of "
            f"{format_bytes(self._capacity_bytes or 0)} {format_bytes(self._used_bytes)} are in use and the largest "
            f"free piece has {format_bytes(self._free.largest_bytes)}; raise the limit with --disk {self.path}:SIZE"
        )

    def _space_error(self, needed_bytes: int, error: OSError) -> StoreError:
        if error.errno == errno.EFBIG:
            return StoreError(
                f"{self.place} cannot grow from {format_bytes(self._reserved_bytes)} by "
                f"{format_bytes(needed_bytes)}: a file size limit is in force; raise it (ulimit -f unlimited)"
            )
        if error.errno not in _OUT_OF_SPACE:
            return refused(
                f"{format_bytes(needed_bytes)} could not be reserved in {self.path}",
                error,
                path=self.path,
                advice=f"give another directory with {self.option} DIR",
                failing=frozenset({errno.EROFS}),  # it could be written to when the file was opened
            )
        try:
            free_text = format_bytes(self._backend.free_bytes(self.path))
        except OSError:
            free_text = "an unknown number of bytes"
        cause = "the disk quota is used up" if error.errno == errno.EDQUOT else f"{free_text} are free"
        return OffloadIOError(
            f"{format_bytes(needed_bytes)} more of disk are needed in {self.path}, but {cause} "
            f"({format_bytes(self._reserved_bytes)} are held by this run already); free space there or give another "
            f"directory with {self.option} DIR",
            path=self.path,
            offset=self._reserved_bytes,
            wanted_bytes=needed_bytes,
            got_bytes=0,
            errno=error.errno or 0,
        )
