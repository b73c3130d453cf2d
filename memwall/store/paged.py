"""A tensor at a fixed address whose memory can be given up and filled again, while everything that points there stays.

Views of it, autograd's saved tensors among them, share its storage: they are valid whenever it `is_here`.
"""

from collections import deque
from typing import Protocol

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.store.backend import round_up
from memwall.store.page_map import PageMap, has_pages, move_pages
from memwall.store.scratch import Slot
from memwall.store.transfer import TransferPool, memory_at
from memwall.store.workers import Transfer


class PagedTensor:
    """Keeps a CPU tensor in an anonymous map of its own, with a slot on disk.

    Args:
        pool: the threads and the file.
        like: dtype, shape and strides; its elements fill a range of memory.
        label: names it in an error.
    """

    def __init__(self, pool: TransferPool, like: Tensor, label: str) -> None:
        num_bytes = like.numel() * like.element_size()
        self._pool, self._label = pool, label
        self.num_bytes = round_up(num_bytes)
        """Counts whole pages; also what it takes on disk."""
        self._pages = PageMap(self.num_bytes)
        self._arrivals: PageMap | None = None
        flat = torch.frombuffer(self._pages.memory, dtype=like.dtype, count=like.numel(), offset=self._pages.offset)
        self.tensor = flat.as_strided(like.size(), like.stride())
        self.is_here = True
        """Says whether the newest bytes are in memory."""
        self.is_shown = False
        """Says whether they are read by way of the system's cache, see `show`."""
        self._is_stored = False
        self._is_wanted = True
        self._slot: Slot | None = None
        self._read: Transfer | None = None
        self._write: Transfer | None = None

    @property
    def is_resident(self) -> bool:
        """Says whether it takes memory: it is here, or on its way."""
        return self.is_here or self._read is not None

    @property
    def is_stored(self) -> bool:
        """Says whether the newest bytes are on disk, or on their way there."""
        return self._is_stored and not (self.is_shown and self._pages.own_bytes)

    @property
    def shown_bytes(self) -> int:
        """Counts the memory that the system has filled to `show` it, and can take back."""
        return self._pages.file_bytes if self.is_shown else 0

    @property
    def slot(self) -> Slot | None:
        """Says where its newest bytes are on disk; None while they are nowhere but in memory."""
        return self._slot if self.is_stored else None

    @property
    def is_written(self) -> bool:
        """Says whether no write of it is under way."""
        return self._write is None or self._write.is_done

    def begin_read(self) -> None:
        """Begins to bring it back, if it is away; it arrives beside its place, and takes it in `want`.

        Raises:
            StoreError: an earlier transfer failed.
        """
        if not self.is_here and not self.is_shown and self._read is None:
            assert self._slot is not None
            view = memory_at(self._map_of_arrivals().address, self.num_bytes)
            self._read = self._pool.read(self._slot, view, label=self._label, keep=self._arrivals)

    def want(self) -> None:
        """Returns once it is here, to stay until `let_go`.

        Raises:
            StoreError: the bytes cannot be had, or came back different; or somebody has used its memory meanwhile.
        """
        self._is_wanted = True
        self._keep_shown()
        self.begin_read()
        if self._read is not None and self._arrivals is not None:
            self._read.wait()
            self._read = None
            self._refuse_touched()
            move_pages(self._arrivals, self._pages)
            self.is_here = True

    def show(self) -> bool:
        """Has its memory read as if it were here, by way of the system's cache, which gives way to other memory.

        It may be written, too: `is_stored` tells. Whoever wants it afterwards does not see a difference.

        Returns:
            False where this is not possible, or it is here already.

        Raises:
            StoreError: the bytes cannot be had, or come back different; or somebody has used its memory meanwhile.
        """
        if self.is_here or self._read is not None or self._slot is None:
            return False
        if not self.is_shown:
            self._refuse_touched()
            self.begin_read()
            self._stop_reading()  # checked, once
            self.is_shown = self._pool.scratch.show(self._slot, self._pages)
        return self.is_shown

    def changed(self) -> None:
        """Says that its elements are about to be written: what is on disk is old. Waits for a write under way.

        Raises:
            StoreError: that write failed.
        """
        self._settle()
        self._is_stored = False

    def overwrite(self) -> None:
        """Does what `want` and `changed` do, for a caller who writes every element: nothing is read.

        Raises:
            StoreError: a transfer under way failed.
        """
        if self._read is not None or self.is_shown:
            self.want()
        self.changed()
        self._is_wanted = self.is_here = True

    def begin_write(self) -> None:
        """Begins to write it out; its elements must not change until `changed` says they will.

        Raises:
            StoreError: no room on disk, or an earlier transfer failed.
        """
        self._settle()
        self._keep_shown()
        self._slot = self._pool.scratch.successor(self._slot, self.num_bytes)
        self._write = self._pool.write(self._slot, self._view(), label=self._label, keep=self._pages)
        self._is_stored = True

    def let_go(self) -> None:
        """Gives up the memory: now, or once the write under way is done and `sweep` is called again.

        Raises:
            StoreError: a transfer failed.
        """
        self._is_wanted = False
        self.sweep()

    def sweep(self) -> None:
        """Gives up the memory if nobody wants it and no write needs it."""
        if self._is_wanted or not self._is_stored:
            return
        if self._write is not None:
            if not self._write.is_done:
                return
            self._settle()
        self._drop_pages()

    def finish_write(self) -> None:
        """Returns once the write under way is done, and give up the memory if nobody wants it.

        Raises:
            StoreError: it failed.
        """
        self._settle()
        self.sweep()

    def stay(self) -> None:
        """Stays in memory for good: the place on disk is given back.

        Raises:
            StoreError: the bytes cannot be had, or came back different; or somebody has used its memory meanwhile.
        """
        self.want()
        self.changed()
        self._give_slot_back()

    def forget(self) -> None:
        """Gives up memory and disk space; the elements are lost. It can be used again through `overwrite`."""
        self._settle()
        self._is_wanted = self._is_stored = False
        self._drop_pages()
        self._give_slot_back()

    def _give_slot_back(self) -> None:
        if self._slot is not None:
            self._pool.scratch.free(self._slot)
            self._slot = None

    def _drop_pages(self) -> None:
        self._stop_reading()
        if self.is_shown:
            self._pages.show_nothing()
            self.is_shown = False
        if self.is_here:
            self._pages.drop_pages()
            self.is_here = False

    def _stop_reading(self) -> None:
        if self._read is not None and self._arrivals is not None:
            self._read.wait()
            self._read = None
            self._arrivals.drop_pages()

    def _keep_shown(self) -> None:
        """Has in memory what is shown, with what was written there; nobody who looks at it sees a gap.

        Who looks at it may write, too, and from now on nothing tells: what is on disk counts as old.
        """
        if self.is_shown:
            self._is_stored = False
            arrivals = self._map_of_arrivals()
            arrivals.copy_of(self._pages)
            move_pages(arrivals, self._pages)
            self.is_shown, self.is_here = False, True

    def _refuse_touched(self) -> None:
        if has_pages(self._pages):
            raise StoreError(
                f"{self._label} was read or written while it was on disk, through something else that shares its "
                "memory, so what came of that is wrong; use it itself in place of what refers to its memory"
            )

    def _map_of_arrivals(self) -> PageMap:
        if self._arrivals is None:
            self._arrivals = PageMap(self.num_bytes)
        return self._arrivals

    def _settle(self) -> None:
        if self._write is not None:
            self._write.wait()
            self._write = None

    def _view(self) -> memoryview:
        return memory_at(self._pages.address, self.num_bytes)


class WrittenBehind(Protocol):
    """Is a tensor that is written out beside the computation, and then gives up its memory."""

    @property
    def num_bytes(self) -> int:
        """Counts the memory that it takes."""

    @property
    def is_stored(self) -> bool:
        """Says whether the newest bytes are in their place, or on their way there."""

    @property
    def is_written(self) -> bool:
        """Says whether no write of it is under way."""

    def begin_write(self) -> None:
        """Begins to write it out."""

    def let_go(self) -> None:
        """Gives up the memory: now, or once the write under way is done."""

    def finish_write(self) -> None:
        """Returns once the write under way is done; gives up memory that nobody wants."""


class WriteBehind:
    """Holds writes of tensors that go on beside the computation, within a bounded amount of memory.

    Args:
        window_bytes: memory that may wait to be written; one tensor may always.
    """

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self._queue: deque[WrittenBehind] = deque()
        self._queued_bytes = 0

    def put_away(self, paged: WrittenBehind) -> None:
        """Lets go of a tensor, after writing it if its newest bytes are not on disk.

        Raises:
            StoreError: a transfer failed.
        """
        while self._queue and self._queue[0].is_written:
            self._finish_oldest()
        if not paged.is_stored:
            while self._queue and self._queued_bytes + paged.num_bytes > self.window_bytes:
                self._finish_oldest()
            paged.begin_write()
            self._queue.append(paged)
            self._queued_bytes += paged.num_bytes
        paged.let_go()

    def drain(self) -> None:
        """Returns once everything is written.

        Raises:
            StoreError: a transfer failed.
        """
        while self._queue:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        paged = self._queue.popleft()
        self._queued_bytes -= paged.num_bytes
        paged.finish_write()
