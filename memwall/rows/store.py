"""A table of rows, larger than memory: a row exists from its first write on, and takes its record's bytes then.

A record holds what belongs to a row together: its weights, then the optimizer's state for it, so that one page brings
both. Rows that do not exist read as their initial values, and leave no trace.
"""

import os
import weakref
from collections.abc import Iterator

import msgspec
import torch
from torch import Tensor

from memwall.errors import UsageError
from memwall.machine.disk_location import check_directory
from memwall.rows.index import RowIndex
from memwall.rows.initial import InitialRows
from memwall.rows.pages import PageCache
from memwall.store.backend import SystemBackend
from memwall.store.closing import Closing
from memwall.store.scratch import ScratchFile

# Zipf ids (exponent 1.1), 20M rows of 768 bytes, cache of 128 MiB, pages read | written a step of 4096 ids at 4, 8, 16
# and 32 KiB a page: 226 | 338, 241 | 299, 240 | 268, 252 | 266. Neighbours arrived together: larger pages lose no hits.
_PAGE_BYTES = 16 << 10
_CHUNK_ROWS = 1 << 14
_NUM_RECENT = 3


class RowColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes optimizer state of a row: `width` elements, which begin as `initial`."""

    name: str
    width: int
    initial: float = 0.0


class RowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says what a record is made of; all is of one dtype."""

    num_weights: int
    dtype: str
    """Name of torch's: "float32"."""
    state: tuple[RowColumns, ...] = ()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Returns the dtype of all elements.

        Raises:
            UsageError: torch has no such dtype.
        """
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype) or not found.is_floating_point:
            raise UsageError(f"'{self.dtype}' is not a floating-point dtype of torch; expected one such as 'float32'")
        return found

    @property
    def num_elements(self) -> int:
        """Returns the elements of a record."""
        return self.num_weights + sum(columns.width for columns in self.state)

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of a record."""
        return self.num_elements * self.torch_dtype.itemsize

    def initial_state(self, num_rows: int) -> Tensor:
        """Returns the state of rows that were never trained, [num_rows, num_elements - num_weights]."""
        parts = [
            torch.full((num_rows, columns.width), columns.initial, dtype=self.torch_dtype, device="cpu")
            for columns in self.state
        ]
        return torch.cat(parts, dim=1) if parts else torch.empty(num_rows, 0, dtype=self.torch_dtype, device="cpu")


class RowStore(Closing):
    """Holds records by id, of which a bounded number is in memory.

    Args:
        layout: what a record is made of.
        initial: weights before the first write.
        directory: a directory on a disk, for what the cache has no room for. Nothing is written there before that.
        cache_bytes: the most memory for records; indices come on top (`memory_bytes`).
        capacity_bytes: the most to take from the disk; None leaves only the disk's own limit.
        backend: the operating system, or a test's substitute for it.
        page_bytes: about how much is moved at a time.

    Raises:
        StoreError: the directory is missing, read-only, or a RAM disk.
        UsageError: the cache is too small.
    """

    def __init__(
        self,
        layout: RowLayout,
        initial: InitialRows,
        *,
        directory: str | os.PathLike[str],
        cache_bytes: int,
        capacity_bytes: int | None = None,
        backend: SystemBackend | None = None,
        page_bytes: int = _PAGE_BYTES,
    ) -> None:
        check_directory(directory)
        self.layout, self.initial = layout, initial
        self._index = RowIndex()
        self._recent: list[tuple[Tensor, Tensor, int]] = []
        self._begun: tuple[Tensor, Tensor] | None = None
        self._max_begun_bytes = cache_bytes // 16
        self._scratch = ScratchFile(directory, backend=backend, capacity_bytes=capacity_bytes, step_bytes=1 << 24)
        try:
            self._pages = PageCache(
                self._scratch,
                row_elements=layout.num_elements,
                dtype=layout.torch_dtype,
                cache_bytes=cache_bytes,
                page_bytes=page_bytes,
            )
        except BaseException:
            self._scratch.close()
            raise
        # Runs when the store is forgotten and at interpreter exit.
        self._finalizer = weakref.finalize(self, _shut_down, self._pages, self._scratch)

    @property
    def num_rows(self) -> int:
        """Returns how many rows exist."""
        return len(self._index)

    @property
    def memory_bytes(self) -> int:
        """Returns the memory held: records, where they are, and how new ones begin."""
        begun_bytes = sum(part.nbytes for part in self._begun or ())
        return self._pages.num_bytes + self._index.num_bytes + begun_bytes

    @property
    def disk_bytes(self) -> int:
        """Returns what is taken from the disk."""
        return self._scratch.reserved_bytes

    @property
    def bytes_read(self) -> int:
        """Returns the bytes fetched from the disk so far."""
        return self._pages.num_pages_read * self._pages.page_bytes

    @property
    def bytes_written(self) -> int:
        """Returns the bytes given to the disk so far."""
        return self._pages.num_pages_written * self._pages.page_bytes

    def weights(self, ids: Tensor) -> Tensor:
        """Returns the weights of these rows, [n, num_weights], in memory of their own.

        Args:
            ids: int64 [n], in any order, also repeated.

        Raises:
            StoreError: they cannot be read.
        """
        return self._read(ids, self.layout.num_weights)

    def records(self, ids: Tensor) -> Tensor:
        """Returns weights and state of these rows, [n, num_elements], in memory of their own.

        Raises:
            StoreError: they cannot be read.
        """
        return self._read(ids, self.layout.num_elements)

    def write(self, ids: Tensor, records: Tensor) -> None:
        """Replaces the records of these rows; those that did not exist do now.

        Args:
            ids: int64 [n], each once.
            records: [n, num_elements].

        Raises:
            StoreError: no room on disk, or a transfer failed; the store refuses further work then.
        """
        self._begun = None
        with self._pages.refusing_after_failure():
            positions = self._find(ids)
            is_new = positions < 0
            if bool(is_new.any()):
                positions = positions.index_put((is_new,), self._index.add(ids[is_new]))
            self._pages.write(positions, records)

    def prefetch(self, ids: Tensor) -> None:
        """Begins to read what of these rows is on disk only."""
        positions = self._find(ids)
        self._pages.prefetch(positions[positions >= 0])

    def every_record(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields all rows that exist, as ids [n] and records [n, num_elements], a few thousand at a time."""
        for first in range(0, len(self._index), _CHUNK_ROWS):
            ids = self._index.ids(first, first + _CHUNK_ROWS)
            positions = torch.arange(first, first + ids.numel(), device="cpu")
            yield ids, self._pages.read(positions, self.layout.num_elements)

    def close(self) -> None:
        """Ends the threads and returns the disk space; the rows are gone."""
        self._finalizer()

    def _find(self, ids: Tensor) -> Tensor:
        """Returns the positions of ids. The same ones come a few times: read ahead, looked up, stepped, written."""
        for number, (known, positions, num_rows) in enumerate(self._recent):
            if torch.equal(known, ids):
                del self._recent[number]
                if num_rows < len(self._index):
                    is_absent = positions < 0
                    positions[is_absent] = self._index.find(ids[is_absent])
                break
        else:
            positions = self._index.find(ids)
            known = ids.clone()
        self._recent = [(known, positions, len(self._index)), *self._recent[: _NUM_RECENT - 1]]
        return positions

    def _read(self, ids: Tensor, num_columns: int) -> Tensor:
        self._pages.check_usable()
        positions = self._find(ids)
        is_new = positions < 0
        if not bool(is_new.any()):
            return self._pages.read(positions, num_columns)
        found = torch.empty(ids.numel(), num_columns, dtype=self.layout.torch_dtype, device="cpu")
        new_ids = ids[is_new]
        num_weights = self.layout.num_weights
        if self._begun is None or not torch.equal(self._begun[0], new_ids):
            self._begun = new_ids, self.initial.rows(new_ids, num_weights, self.layout.torch_dtype)
        begun = self._begun[1]
        if begun.nbytes > self._max_begun_bytes:  # kept where rows are looked up, and then stepped
            self._begun = None
        if num_columns > num_weights:
            begun = torch.cat([begun, self.layout.initial_state(new_ids.numel())], dim=1)
        found[is_new] = begun
        found[~is_new] = self._pages.read(positions[~is_new], num_columns)
        return found


def _shut_down(pages: PageCache, scratch: ScratchFile) -> None:
    pages.close()
    scratch.close()
