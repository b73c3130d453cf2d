"""Which row of a table lies where: from ids, any of which may exist, to positions 0, 1, ... in order of arrival.

Memory follows the rows that exist, not the largest id: 8 bytes of id and 4 to 8 bytes of hash table for each. All work
is done on whole batches of ids.
"""

import torch
from torch import Tensor

from memwall.errors import StoreError
from memwall.rows.loops import find_rows, place_rows, rows_library

_MAX_LOAD = 0.7
_MIN_CELLS = 1024
_GROWTH = 1.25
_MAX_ROWS = (1 << 31) - 1


class RowIndex:
    """Is a hash table with linear probing: cells hold positions; the ids themselves lie in order of arrival."""

    def __init__(self) -> None:
        rows_library()  # raises where there is none, before anything is looked up
        self._num_rows = 0
        self._ids = torch.empty(0, dtype=torch.int64, device="cpu")
        self._cells = torch.full((_MIN_CELLS,), -1, dtype=torch.int32, device="cpu")

    def __len__(self) -> int:
        return self._num_rows

    @property
    def num_bytes(self) -> int:
        """Returns the memory held."""
        return self._ids.nbytes + self._cells.nbytes

    def ids(self, first: int, end: int) -> Tensor:
        """Returns the ids at positions [first, end)."""
        return self._ids[first : min(end, self._num_rows)]

    def find(self, ids: Tensor) -> Tensor:
        """Returns the position of each id, -1 where there is none.

        Args:
            ids: int64 [n], in any order, also repeated.
        """
        return find_rows(self._cells, self._ids[: self._num_rows], ids)

    def add(self, ids: Tensor) -> Tensor:
        """Takes ids in, in their order; returns the positions they get.

        Args:
            ids: int64 [n], each once, none of which is here.

        Raises:
            StoreError: more rows than an index holds.
        """
        first, end = self._num_rows, self._num_rows + ids.numel()
        if end > _MAX_ROWS:
            raise StoreError(f"a table of rows holds at most {_MAX_ROWS} on a rank; share it between more ranks")
        if end > self._ids.numel():
            grown = torch.empty(max(end, int(self._ids.numel() * _GROWTH)), dtype=torch.int64, device="cpu")
            grown[:first] = self._ids[:first]
            self._ids = grown
        self._ids[first:end] = ids
        self._num_rows = end
        if end > self._cells.numel() * _MAX_LOAD:
            num_cells = self._cells.numel()
            while end > num_cells * _MAX_LOAD:
                num_cells *= 2
            del self._cells  # so that the old and the new one are never both there
            self._cells = torch.full((num_cells,), -1, dtype=torch.int32, device="cpu")
            for start in range(0, end, 1 << 16):
                place_rows(self._cells, self._ids, start, min(end, start + (1 << 16)))
        else:
            place_rows(self._cells, self._ids, first, end)
        return torch.arange(first, end, device="cpu")
