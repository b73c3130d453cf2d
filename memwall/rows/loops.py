"""Loops over the rows of a table, in C. By tensors each would be a chain of small operations, most of it calls.

All tensors are contiguous and in host memory; positions, ids and frames are int64.
"""

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from memwall.errors import NotAvailableError
from memwall.native import load_library

COLD, RECENT, HELD = 0, 1, 2
"""Uses of a frame: the clock's hand takes the first, makes it of the second, and passes the third."""
NUM_LEVELS = 1 << 16
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_IS_MISSING, _IS_MOVING = 1, 2


def mixed(values: Tensor) -> Tensor:
    """64 well-mixed bits for each int64: the output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    bits = values * _GOLDEN
    # `>>` keeps the sign, the function wants zeros.
    bits = (bits ^ ((bits >> 30) & ((1 << 34) - 1))) * _FIRST
    bits = (bits ^ ((bits >> 27) & ((1 << 37) - 1))) * _SECOND
    return bits ^ ((bits >> 31) & ((1 << 33) - 1))


def find_rows(cells: Tensor, ids: Tensor, wanted: Tensor) -> Tensor:
    """Returns of each wanted id its position among `ids`, -1 where there is none.

    Args:
        cells: int32, a power of two of them, some empty: positions where linear probing has put them, -1 for none.
        ids: by position.
        wanted: [n], in any order, also repeated.
    """
    wanted = wanted.to(torch.int64).contiguous()
    found = torch.empty_like(wanted)
    pointers = cells.data_ptr(), cells.numel(), ids.data_ptr(), ids.numel(), wanted.data_ptr(), wanted.numel()
    rows_library().find_rows(*pointers, found.data_ptr())
    return found


def place_rows(cells: Tensor, ids: Tensor, first: int, end: int) -> None:
    """Puts the positions [first, end) into cells, of which some stay empty."""
    assert end <= ids.numel()
    rows_library().place_rows(cells.data_ptr(), cells.numel(), ids.data_ptr(), first, end)


def draw_rows(ids: Tensor, seed: int, num_columns: int, levels: Tensor) -> Tensor:
    """Draws rows [n, num_columns] (float32) by seed and id alone: of each element one of 65,536 levels.

    Args:
        ids: [n].
        levels: float32 [65536], which are equally likely.
    """
    assert levels.numel() == NUM_LEVELS
    start = int(mixed(torch.tensor(seed, dtype=torch.int64, device="cpu")))
    ids = ids.to(torch.int64).contiguous()
    rows = levels.new_empty(ids.numel(), num_columns)
    where = levels.data_ptr(), rows.data_ptr()
    rows_library().draw_rows(ids.data_ptr(), ids.numel(), start, num_columns, *where)
    return rows


class _CArena(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        *((name, ctypes.c_uint64) for name in ("num_frames", "page_bytes", "rows_per_page", "row_bytes")),
    )


class Arena:
    """Copies rows out of frames of memory, and into them.

    Args:
        rows: [frames, rows in a page, elements], strided over memory that outlives this; rows are without gaps.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows: Final = rows
        num_frames, rows_per_page, self._num_elements = rows.shape
        size = rows.itemsize
        sizes = num_frames, rows.stride(0) * size, rows_per_page, self._num_elements * size
        self._in_c = _CArena(rows.data_ptr(), *sizes)

    def read(self, frames: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """Returns the first elements of rows, [n, num_columns], whose pages are in these frames."""
        found = self._rows.new_empty(frames.numel(), num_columns)
        self._copy(frames, positions, found, is_into_arena=False)
        return found

    def write(self, frames: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Replaces rows, each given once, whose pages are in these frames, by [n, elements]."""
        rows = rows.to(self._rows.dtype).expand(frames.numel(), self._num_elements).contiguous()
        self._copy(frames, positions, rows, is_into_arena=True)

    def _copy(self, frames: Tensor, positions: Tensor, rows: Tensor, *, is_into_arena: bool) -> None:
        assert frames.numel() == positions.numel() == rows.shape[0]
        positions, num_bytes = positions.contiguous(), rows.shape[1] * rows.itemsize
        pointers = frames.data_ptr(), positions.data_ptr(), frames.numel(), rows.data_ptr(), num_bytes
        num_copied: int = rows_library().copy_rows(ctypes.byref(self._in_c), *pointers, int(is_into_arena))
        if num_copied != positions.numel():
            raise IndexError(f"row {num_copied} of {positions.numel()} lies outside the memory of a table of rows")


def locate_rows(
    positions: Tensor, rows_per_page: int, frame_of: Tensor, use: Tensor, is_moving: Tensor
) -> tuple[Tensor, bool, bool]:
    """Returns each row's frame, negative without one; whether one is so; and whether one's page is moving.

    Args:
        positions: [n].
        rows_per_page: how many positions share a page.
        frame_of: int32, by page.
        use: uint8, by frame; those of these rows become `RECENT`.
        is_moving: bool, by frame.
    """
    positions = positions.contiguous()
    frames = torch.empty_like(positions)
    pointers = positions.data_ptr(), positions.numel(), rows_per_page, frame_of.data_ptr(), frame_of.numel()
    states = use.data_ptr(), is_moving.data_ptr(), use.numel()
    found: int = rows_library().locate_rows(*pointers, *states, frames.data_ptr())
    return frames, bool(found & _IS_MISSING), bool(found & _IS_MOVING)


def take_cold_frames(use: Tensor, is_moving: Tensor, hand: int, count: int) -> tuple[Tensor, int]:
    """Turns the clock: returns up to `count` frames, cold and not moving, which are held then; and the hand.

    Those recently used that the hand passes become cold. Ends after two rounds.

    Args:
        use: uint8, by frame.
        is_moving: bool, by frame.
        hand: the frame to begin with.
        count: frames wanted.
    """
    at, taken = ctypes.c_int64(hand), torch.empty(count, dtype=torch.int64, device="cpu")
    states = use.data_ptr(), is_moving.data_ptr(), use.numel()
    num_taken: int = rows_library().take_frames(*states, ctypes.byref(at), count, taken.data_ptr())
    return taken[:num_taken], at.value


@functools.cache
def rows_library() -> ctypes.CDLL:
    """Returns the loops in C.

    Raises:
        NotAvailableError: this installation was made without a C compiler, or not on Linux.
    """
    number, pointer, flag = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
    signatures = {
        "find_rows": (None, (pointer, number, pointer, number, pointer, number, pointer)),
        "place_rows": (None, (pointer, number, pointer, number, number)),
        "draw_rows": (None, (pointer, number, number, number, pointer, pointer)),
        "copy_rows": (number, (pointer, pointer, pointer, number, pointer, number, flag)),
        "locate_rows": (flag, (pointer, number, number, pointer, number, pointer, pointer, number, pointer)),
        "take_frames": (number, (pointer, pointer, number, pointer, number, pointer)),
    }
    library = load_library("rows", signatures, folder=Path(__file__).parent / "native")
    if library is None:
        raise NotAvailableError(
            "tables of rows need memwall's library in C, which this installation lacks; install a wheel for Linux, or "
            "install again where there is a C compiler",
            name="memwall.rows.native.rows",
        )
    return library
