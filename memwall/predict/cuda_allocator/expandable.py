"""Expandable segments: a reservation of addresses into which memory is mapped granule by granule, and unmapped again.

After `ExpandableSegment`, `try_allocate_expandable_block`, `map_block` and `unmap_block` of CUDACachingAllocator.cpp.
"""

from memwall.predict.cuda_allocator.memory_blocks import FREE, UNMAPPED, Block, FreeSet
from memwall.predict.cuda_allocator.rounding import SMALL_BUFFER_BYTES, round_up
from memwall.predict.cuda_allocator.state import AllocatorState


def allocate(state: AllocatorState, nbytes: int, home: FreeSet) -> Block | None:
    """Returns a free block of at least `nbytes`, outside the free set; None if the device refuses memory.

    What was mapped before a refusal stays mapped.
    """
    block: Block | None = _first_run(nbytes, home)
    if block is None:
        block = _reserve(state, home)
    if block.state == UNMAPPED and not _map(state, block, min(block.size, nbytes)):
        return None
    while block.size < nbytes:
        following = block.next
        if following is None or not _map(state, following, min(nbytes - block.size, following.size)):
            return None
        # Mapping merges with the free block in front: the run is now the block that was mapped last.
        block = following
    home.remove(block)
    return block


def release(state: AllocatorState, block: Block) -> None:
    """Unmaps the whole granules inside a free block; what is left at its ends stays free."""
    home, segment = block.home, block.segment
    granule = segment.granule_bytes
    begin = segment.start + round_up(block.start - segment.start, granule)
    end = segment.start + (block.start + block.size - segment.start) // granule * granule
    if end <= begin:
        return
    home.remove(block)
    if begin > block.start:
        before = state.new_block(block.start, begin - block.start, FREE, home, segment)
        _link(block.prev, before)
        _link(before, block)
        home.insert(before)
    if end < block.start + block.size:
        after = state.new_block(end, block.start + block.size - end, FREE, home, segment)
        _link(after, block.next)
        _link(block, after)
        home.insert(after)
    block.start, block.size, block.state = begin, end - begin, UNMAPPED
    _merge_neighbours(block)
    home.insert_unmapped(block)
    state.unreserve(segment.address + begin - segment.start, end - begin, home, segment)
    if not block.is_split:
        home.remove_unmapped(block)


def reservation_bytes(total_bytes: int, granule_bytes: int) -> int:
    """Returns the addresses that a segment reserves on a device with so much memory."""
    return round_up(total_bytes * 9 // 8, granule_bytes)


def _first_run(nbytes: int, home: FreeSet) -> Block | None:
    """Returns the first unmapped block, or free one in front of it, from which enough free or unmapped bytes follow."""
    for unmapped in home.unmapped:
        first = unmapped
        if first.prev is not None and first.prev.state == FREE:
            first = first.prev
        found, block = 0, first
        while found < nbytes:
            found += block.size
            if block.next is None or block.next.state not in (FREE, UNMAPPED):
                break
            block = block.next
        if found >= nbytes:
            return first
    return None


def _reserve(state: AllocatorState, home: FreeSet) -> Block:
    """Returns a new reservation of 9/8 of the device's memory, all of it unmapped."""
    granule = SMALL_BUFFER_BYTES if home.pool.is_small else state.settings.large_segment_bytes
    segment = state.new_segment(reservation_bytes(state.total_bytes, granule), granule)
    block = state.new_block(segment.start, segment.nbytes, UNMAPPED, home, segment)
    home.insert_unmapped(block)
    return block


def _map(state: AllocatorState, block: Block, nbytes: int) -> bool:
    """Backs the front of an unmapped block with memory, in whole granules and all or nothing."""
    home, segment = block.home, block.segment
    mapped = round_up(nbytes, segment.granule_bytes)
    if not state.has_room(mapped):
        return False
    home.remove_unmapped(block)
    if mapped < block.size:
        rest = state.new_block(block.start + mapped, block.size - mapped, UNMAPPED, home, segment)
        _link(rest, block.next)
        _link(block, rest)
        home.insert_unmapped(rest)
        block.size = mapped
    state.reserve(block.address, mapped, home, segment)
    block.state = FREE
    _merge_neighbours(block)
    home.insert(block)
    return True


def _merge_neighbours(block: Block) -> None:
    """Takes in the neighbours in the same state; the block itself is in no set."""
    home = block.home
    for neighbour in (block.prev, block.next):
        if neighbour is None or neighbour.state != block.state:
            continue
        if block.state == UNMAPPED:
            home.remove_unmapped(neighbour)
        else:
            home.remove(neighbour)
        if neighbour is block.prev:
            block.start = neighbour.start
            _link(neighbour.prev, block)
        else:
            _link(block, neighbour.next)
        block.size += neighbour.size


def _link(left: Block | None, right: Block | None) -> None:
    if left is not None:
        left.next = right
    if right is not None:
        right.prev = left
