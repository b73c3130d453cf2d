"""Giving cached memory back: garbage collection, releasing just enough, releasing all of it.

After `garbage_collect_cached_blocks`, `release_available_cached_blocks` and `release_cached_blocks` of
CUDACachingAllocator.cpp.
"""

from bisect import bisect_left

from memwall.predict.cuda_allocator import expandable
from memwall.predict.cuda_allocator.memory_blocks import KEY_SHIFT, FreeSet
from memwall.predict.cuda_allocator.state import AllocatorState


def collect_garbage(state: AllocatorState) -> None:
    """Releases old cached segments of the default large pool until reserved memory is below the threshold again."""
    if state.limit_bytes is None:
        return
    keep_bytes = int(state.settings.garbage_collection_threshold * state.limit_bytes)
    target_bytes = state.reserved_bytes - keep_bytes
    if target_bytes <= 0:
        return
    pool = state.large
    candidates = [block for block in pool.in_order() if not (block.is_split or block.segment.is_expandable)]
    ages = {id(block): pool.num_searches - block.gc_base for block in candidates}
    released_bytes = 0
    while released_bytes < target_bytes and candidates:
        total_age, count = sum(ages[id(block)] for block in candidates), len(candidates)
        # age >= total / count, in integers.
        old = [block for block in candidates if ages[id(block)] * count >= total_age]
        for block in old:
            released_bytes += block.size
            state.release_segment(block)
        gone = {id(block) for block in old}
        candidates = [block for block in candidates if id(block) not in gone]


def release_available(state: AllocatorState, nbytes: int, home: FreeSet) -> bool:
    """Releases one cached oversize segment that is large enough, or the largest ones until their sum is.

    Returns:
        Whether enough was released; what was released short of that stays released.
    """
    max_split_bytes = state.settings.max_split_bytes
    if max_split_bytes is None:
        return False
    wanted_bytes = max(nbytes, max_split_bytes)
    index = bisect_left(home.keys, wanted_bytes << KEY_SHIFT)
    if index < len(home.blocks) and not home.blocks[index].segment.is_expandable:
        state.release_segment(home.blocks[index])
        return True
    released_bytes = 0
    for block in reversed(home.blocks.copy()):
        if released_bytes >= wanted_bytes or block.size < max_split_bytes:
            break
        if not block.segment.is_expandable:
            state.release_segment(block)
            released_bytes += block.size
    return released_bytes >= wanted_bytes


def release_all(state: AllocatorState) -> None:
    """Releases every unsplit cached segment and unmaps every free granule."""
    for pool in (state.large, state.small):
        blocks = pool.in_order()
        for block in blocks:
            if not block.segment.is_expandable and not block.is_split:
                state.release_segment(block)
        for block in blocks:
            if block.segment.is_expandable:
                expandable.release(state, block)
