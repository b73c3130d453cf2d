"""An allocator that begins with memory held already, as a recording that was begun late leaves it.

Where each block lies is known, in what order they came is not: segments and blocks are numbered by address. What is
reserved for expandable segments is taken to begin at the first mapped byte.
"""

from collections import deque
from itertools import pairwise

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.expandable import reservation_bytes
from memwall.predict.cuda_allocator.held_blocks import Held, Range
from memwall.predict.cuda_allocator.memory_blocks import FREE, PENDING, UNMAPPED, USED, Block
from memwall.predict.cuda_allocator.rounding import SMALL_BUFFER_BYTES
from memwall.predict.cuda_allocator.simulator import CudaAllocator

_Waiting = deque[tuple[int, int, int, int]]
"""Blocks that lie in no segment yet: number, address, end and state of each."""
_Piece = tuple[int, int, int, int | None]
"""Address, end, state, and the number of a block in use."""


def load(device: CudaAllocator, held: Held) -> dict[int, Block]:
    """Fills an allocator that holds nothing yet; its peaks begin with what it then holds.

    Returns:
        The blocks in use, and those that wait for another stream, by their numbers.

    Raises:
        UsageError: a block lies outside of the memory that is held, or two overlap.
    """
    found: dict[int, Block] = {}
    waiting: _Waiting = deque(
        (-1 - index, block.address, block.end, PENDING if block.is_pending else USED)
        for index, block in enumerate(held.blocks)
    )
    for ranges in _segments(held, device.total_bytes):
        first = ranges[0]
        pieces = _pieces(ranges, waiting)
        granule_bytes, nbytes = 0, first.num_bytes
        if first.is_expandable:
            granule_bytes = _granule_bytes(held, first)
            nbytes = reservation_bytes(device.total_bytes, granule_bytes)
            if ranges[-1].end < first.address + nbytes:
                pieces.append((ranges[-1].end, first.address + nbytes, UNMAPPED, None))
        segment = device.new_segment(nbytes, granule_bytes, first.address)
        home = (device.small if first.is_small else device.large).free_set(first.stream)
        chain = []
        for address, end, state, number in pieces:
            block = device.new_block(segment.start + address - segment.address, end - address, state, home, segment)
            chain.append(block)
            if number is not None:
                found[number] = block
            if state != UNMAPPED:
                device.reserved_bytes += block.size
            if state == USED:
                device.allocated_bytes += block.size
            elif state == PENDING:
                device.pending[block] = None
        for left, right in pairwise(chain):
            left.next, right.prev = right, left
        for block in chain:
            if block.state == FREE:
                home.insert(block)
            elif block.state == UNMAPPED:
                home.insert_unmapped(block)
        device.has_expandable = device.has_expandable or first.is_expandable
    if waiting:
        raise UsageError(f"block {waiting[0][0]} lies outside of the memory that is held")
    device.reserved_peak_bytes, device.allocated_peak_bytes = device.reserved_bytes, device.allocated_bytes
    device.update_search()
    return found


def _segments(held: Held, total_bytes: int) -> list[list[Range]]:
    """Groups ranges by their segment: a classic one for each, one reservation for those of a pool and stream."""
    found: list[list[Range]] = []
    open_for: dict[tuple[int, bool], list[Range]] = {}
    for piece in sorted(held.ranges, key=lambda piece: piece.address):
        key = (piece.stream, piece.is_small)
        if piece.is_expandable and key in open_for:
            ranges = open_for[key]
            end = ranges[0].address + reservation_bytes(total_bytes, _granule_bytes(held, piece))
            if piece.end <= end and found[-1] is ranges:
                ranges.append(piece)
                continue
        found.append([piece])
        if piece.is_expandable:
            open_for[key] = found[-1]
    return found


def _granule_bytes(held: Held, piece: Range) -> int:
    return SMALL_BUFFER_BYTES if piece.is_small else held.granule_bytes


def _pieces(ranges: list[Range], waiting: _Waiting) -> list[_Piece]:
    """Returns what lies in a segment, in order; takes its blocks from the front of `waiting`."""
    pieces: list[_Piece] = []
    place = ranges[0].address
    for piece in ranges:
        if piece.address > place:
            pieces.append((place, piece.address, UNMAPPED, None))
        place = piece.address
        while waiting and waiting[0][1] < piece.end:
            number, address, end, state = waiting.popleft()
            if address < place or end > piece.end:
                raise UsageError(f"block {number} overlaps another, or the end of the memory that is held")
            if address > place:
                pieces.append((place, address, FREE, None))
            pieces.append((address, end, state, number))
            place = end
        if place < piece.end:
            pieces.append((place, piece.end, FREE, None))
            place = piece.end
    return pieces
