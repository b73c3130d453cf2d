"""Loops over the rows of a table, in C where the installation has a library for them, and by tensors where not.

By tensors, each is a chain of small operations, most of whose time is torch's own for a call. Both ways give the same.
All tensors are contiguous and in host memory; positions, ids and frames are int64.
"""

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from memwall.native import load_library

__all__ = [
    "COLD",
    "HELD",
    "RECENT",
    "NUM_LEVELS",
    "Arena",
    "draw_rows",
    "find_rows",
    "locate_rows",
    "mixed",
    "place_rows",
    "rows_library",
    "take_cold_frames",
]

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
    library, wanted = rows_library(), wanted.to(torch.int64).contiguous()
    if library is not None:
        found = torch.empty_like(wanted)
        pointers = cells.data_ptr(), cells.numel(), ids.data_ptr(), ids.numel(), wanted.data_ptr(), wanted.numel()
        library.find_rows(*pointers, found.data_ptr())
        return found
    found = torch.full_like(wanted, -1)
    mask = cells.numel() - 1
    waiting, cell = torch.arange(wanted.numel(), device="cpu"), mixed(wanted) & mask
    while waiting.numel():
        position = cells[cell].long()
        is_taken = position >= 0
        is_hit = is_taken.clone()
        is_hit[is_taken] = ids[position[is_taken]] == wanted[is_taken]
        found[waiting[is_hit]] = position[is_hit]
        goes_on = is_taken & ~is_hit
        waiting, wanted, cell = waiting[goes_on], wanted[goes_on], (cell[goes_on] + 1) & mask
    return found


def place_rows(cells: Tensor, ids: Tensor, first: int, end: int) -> None:
    """Puts the positions [first, end) into cells, of which some stay empty."""
    assert end <= ids.numel()
    library = rows_library()
    if library is not None:
        library.place_rows(cells.data_ptr(), cells.numel(), ids.data_ptr(), first, end)
        return
    mask = cells.numel() - 1
    position = torch.arange(first, end, dtype=torch.int32, device="cpu")
    cell = mixed(ids[first:end]) & mask
    while position.numel():
        is_free = cells[cell] < 0
        # Several may want one cell: whichever is left in it has it, the others go on.
        cells[cell[is_free]] = position[is_free]
        goes_on = cells[cell] != position
        position, cell = position[goes_on], (cell[goes_on] + 1) & mask


def draw_rows(ids: Tensor, seed: int, num_columns: int, levels: Tensor) -> Tensor:
    """Draws rows [n, num_columns] (float32) by seed and id alone: of each element one of 65,536 levels.

    Args:
        ids: [n].
        levels: float32 [65536], which are equally likely.
    """
    assert levels.numel() == NUM_LEVELS
    num_words = -(-num_columns // 4)  # one hash makes four elements of 16 bits each
    start = mixed(torch.tensor(seed, dtype=torch.int64, device="cpu"))
    library = rows_library()
    if library is not None:
        ids = ids.to(torch.int64).contiguous()
        rows = levels.new_empty(ids.numel(), num_columns)
        where = levels.data_ptr(), rows.data_ptr()
        library.draw_rows(ids.data_ptr(), ids.numel(), int(start), num_columns, *where)
        return rows
    counters = ids[:, None] * num_words + torch.arange(num_words, device="cpu")
    words = mixed(start + counters)[:, :, None] >> torch.tensor([0, 16, 32, 48], device="cpu")
    return levels[(words & (NUM_LEVELS - 1)).reshape(ids.numel(), 4 * num_words)[:, :num_columns]]


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
        num_frames, self._rows_per_page, self._num_elements = rows.shape
        size = rows.itemsize
        sizes = num_frames, rows.stride(0) * size, self._rows_per_page, self._num_elements * size
        self._in_c = _CArena(rows.data_ptr(), *sizes)

    def read(self, frames: Tensor, positions: Tensor, num_columns: int) -> Tensor:
        """Returns the first elements of rows, [n, num_columns], whose pages are in these frames."""
        library = rows_library()
        if library is None:
            return self._rows[:, :, :num_columns][frames, positions % self._rows_per_page]
        found = self._rows.new_empty(frames.numel(), num_columns)
        self._copy(library, frames, positions, found, is_into_arena=False)
        return found

    def write(self, frames: Tensor, positions: Tensor, rows: Tensor) -> None:
        """Replaces rows, each given once, whose pages are in these frames, by [n, elements]."""
        library = rows_library()
        rows = rows.to(self._rows.dtype).expand(frames.numel(), self._num_elements).contiguous()
        if library is None:
            self._rows[frames, positions % self._rows_per_page] = rows
        else:
            self._copy(library, frames, positions, rows, is_into_arena=True)

    def _copy(
        self, library: ctypes.CDLL, frames: Tensor, positions: Tensor, rows: Tensor, *, is_into_arena: bool
    ) -> None:
        assert frames.numel() == positions.numel() == rows.shape[0]
        positions, num_bytes = positions.contiguous(), rows.shape[1] * rows.itemsize
        pointers = frames.data_ptr(), positions.data_ptr(), frames.numel(), rows.data_ptr(), num_bytes
        num_copied: int = library.copy_rows(ctypes.byref(self._in_c), *pointers, int(is_into_arena))
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
    library = rows_library()
    if library is None:
        frames = frame_of[positions // rows_per_page].long()
        has_frame = frames >= 0
        here = frames[has_frame]
        use[here] = RECENT
        return frames, not bool(has_frame.all()), bool(is_moving[here].any())
    positions = positions.contiguous()
    frames = torch.empty_like(positions)
    pointers = positions.data_ptr(), positions.numel(), rows_per_page, frame_of.data_ptr(), frame_of.numel()
    states = use.data_ptr(), is_moving.data_ptr(), use.numel()
    found: int = library.locate_rows(*pointers, *states, frames.data_ptr())
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
    library, num_frames = rows_library(), use.numel()
    if library is not None:
        at, taken = ctypes.c_int64(hand), torch.empty(count, dtype=torch.int64, device="cpu")
        states = use.data_ptr(), is_moving.data_ptr(), num_frames
        num_taken: int = library.take_frames(*states, ctypes.byref(at), count, taken.data_ptr())
        return taken[:num_taken], at.value
    parts, needed, num_left = [torch.empty(0, dtype=torch.int64, device="cpu")], count, 2 * num_frames
    while needed and num_left:
        width = min(num_frames, num_left, max(1024, 2 * needed))
        window = (hand + torch.arange(width, device="cpu")) % num_frames
        cold = ((use[window] == COLD) & ~is_moving[window]).nonzero()[:, 0][:needed]
        if cold.numel() == needed:
            window = window[: int(cold[-1]) + 1]
        chosen = window[cold]
        use[window[use[window] == RECENT]] = COLD
        use[chosen] = HELD
        hand = (int(window[-1]) + 1) % num_frames
        needed -= chosen.numel()
        num_left -= window.numel()
        parts.append(chosen)
    return torch.cat(parts), hand


@functools.cache
def rows_library() -> ctypes.CDLL | None:
    """Returns the loops in C, if this installation has them."""
    number, pointer, flag = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int
    signatures = {
        "find_rows": (None, (pointer, number, pointer, number, pointer, number, pointer)),
        "place_rows": (None, (pointer, number, pointer, number, number)),
        "draw_rows": (None, (pointer, number, number, number, pointer, pointer)),
        "copy_rows": (number, (pointer, pointer, pointer, number, pointer, number, flag)),
        "locate_rows": (flag, (pointer, number, number, pointer, number, pointer, pointer, number, pointer)),
        "take_frames": (number, (pointer, pointer, number, pointer, number, pointer)),
    }
    return load_library("rows", signatures, folder=Path(__file__).parent / "native")
