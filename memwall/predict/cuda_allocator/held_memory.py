"""An allocator that begins with memory held already, as a recording that was begun late leaves it.

Where each block lies is known, in what order they came is not: segments and blocks are numbered by address. What is
reserved for expandable segments is taken to begin at the first mapped byte.
"""

from collections import deque
from itertools import pairwise

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.allocator_events import HeldBlock, HeldMemory, HeldRange
from memwall.predict.cuda_allocator.memory_blocks import FREE, PENDING, UNMAPPED, USED, Block, Segment
from memwall.predict.cuda_allocator.rounding import SMALL_BUFFER_BYTES, round_up
from memwall.predict.cuda_allocator.simulator import CudaAllocator
from memwall.predict.cuda_allocator.state import PendingUse

__all__ = ["load"]

_Piece = tuple[int, int, int, HeldBlock | None]
"""Address, bytes, state, and which block if it is in use."""


def load(device: CudaAllocator, held: HeldMemory) -> dict[int, Block]:
    """Fills an allocator that holds nothing yet; its peaks begin with what it then holds.

    Returns:
        The blocks in use, and those that wait for another stream, by their numbers.

    Raises:
        UsageError: a block lies outside of the memory that is held, or two overlap.
    """
    found: dict[int, Block] = {}
    waiting = list(reversed(held.blocks))
    for ranges in _segments(held, device.total_bytes):
        first = ranges[0]
        pieces = _pieces(ranges, waiting)
        granule_bytes, nbytes = 0, first.nbytes
        if first.is_expandable:
            granule_bytes = SMALL_BUFFER_BYTES if first.is_small else held.granule_bytes
            nbytes = _reservation_bytes(device.total_bytes, granule_bytes)
            end = ranges[-1].address + ranges[-1].nbytes
            if end < first.address + nbytes:
                pieces.append((end, first.address + nbytes - end, UNMAPPED, None))
        segment = device.place_segment(nbytes, granule_bytes, first.address)
        chain = [_block(device, segment, piece, first, found) for piece in pieces]
        for left, right in pairwise(chain):
            left.next, right.prev = right, left
        for block in chain:
            if block.state == FREE:
                block.home.insert(block)
            elif block.state == UNMAPPED:
                block.home.insert_unmapped(block)
        _count(device, segment, chain)
    if waiting:
        raise UsageError(f"block {waiting[-1].number} lies outside of the memory that is held")
    device.reserved_peak_bytes = device.reserved_bytes
    device.allocated_peak_bytes = device.allocated_bytes
    device.active_peak_bytes = device.active_at_reserved_peak_bytes = device.active_bytes
    device.requested_peak_bytes = device.requested_bytes
    device.num_splits_peak, device.split_peak_bytes = device.num_splits, device.split_bytes
    device.set_settings(device.settings)
    return found


def _segments(held: HeldMemory, total_bytes: int) -> list[list[HeldRange]]:
    """Ranges by the segment that they are of: a classic one each, one reservation for those of a pool and stream."""
    found: list[list[HeldRange]] = []
    open_for: dict[tuple[int, bool], list[HeldRange]] = {}
    for held_range in sorted(held.ranges, key=lambda held_range: held_range.address):
        key = (held_range.stream, held_range.is_small)
        if held_range.is_expandable and key in open_for:
            ranges = open_for[key]
            granule_bytes = SMALL_BUFFER_BYTES if held_range.is_small else held.granule_bytes
            end = ranges[0].address + _reservation_bytes(total_bytes, granule_bytes)
            if held_range.address + held_range.nbytes <= end and found[-1] is ranges:
                ranges.append(held_range)
                continue
        found.append([held_range])
        if held_range.is_expandable:
            open_for[key] = found[-1]
    return found


def _reservation_bytes(total_bytes: int, granule_bytes: int) -> int:
    return round_up(total_bytes * 9 // 8, granule_bytes)


def _pieces(ranges: list[HeldRange], waiting: list[HeldBlock]) -> list[_Piece]:
    """What lies in a segment, in order; takes its blocks from the end of `waiting`."""
    pieces: list[_Piece] = []
    place = ranges[0].address
    for held_range in ranges:
        if held_range.address > place:
            pieces.append((place, held_range.address - place, UNMAPPED, None))
        place, end = held_range.address, held_range.address + held_range.nbytes
        while waiting and waiting[-1].address < end:
            block = waiting.pop()
            if block.address < place or block.address + block.nbytes > end:
                raise UsageError(f"block {block.number} overlaps another, or the end of the memory that is held")
            if block.address > place:
                pieces.append((place, block.address - place, FREE, None))
            pieces.append((block.address, block.nbytes, PENDING if block.is_pending else USED, block))
            place = block.address + block.nbytes
        if place < end:
            pieces.append((place, end - place, FREE, None))
            place = end
    return pieces


def _block(
    device: CudaAllocator, segment: Segment, piece: _Piece, held_range: HeldRange, found: dict[int, Block]
) -> Block:
    address, nbytes, state, held_block = piece
    pool = device.small if held_range.is_small else device.large
    home = pool.free_set(held_range.stream)
    block = device.new_block(segment.start + address - segment.address, nbytes, state, home, segment)
    if held_block is not None:
        block.requested = held_block.requested_bytes
        found[held_block.number] = block
        if state == PENDING:
            # For which streams it waits is not known, only until when.
            block.num_pending = 1
            device.uses[-1 - len(device.uses)] = deque((PendingUse(block),))
    return block


def _count(device: CudaAllocator, segment: Segment, chain: list[Block]) -> None:
    """Adds a segment to the figures; free memory that shares a classic one with blocks in use is split."""
    device.has_expandable = device.has_expandable or segment.is_expandable
    if not segment.is_expandable:
        device.num_segments += 1
        device.num_oversize_segments += segment.nbytes >= device.max_split_bytes
    for block in chain:
        if block.state == UNMAPPED:
            continue
        device.reserved_bytes += block.size
        if block.state == FREE:
            if not segment.is_expandable and block.is_split:
                device.num_splits += 1
                device.split_bytes += block.size
            continue
        device.active_bytes += block.size
        device.requested_bytes += block.requested
        if block.state == USED:
            device.allocated_bytes += block.size
            device.num_oversize_allocations += block.size >= device.max_split_bytes
