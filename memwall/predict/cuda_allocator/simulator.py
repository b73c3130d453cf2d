"""PyTorch's CUDA caching allocator, simulated: where each block goes, and what the process holds of the device.

Pure arithmetic on sizes, without torch and without a device. After `DeviceCachingAllocator` of
`c10/cuda/CUDACachingAllocator.cpp`; which releases behave how is `torch_releases.py`. Left out: private pools (CUDA
graphs, MemPool), free-memory callbacks and hinted allocation. `malloc` and `complete` are written out in full instead
of in pieces: they run for every event.
"""

from bisect import bisect_left

from memwall.errors import UsageError
from memwall.predict.cuda_allocator import expandable
from memwall.predict.cuda_allocator.memory_blocks import FREE, KEY_SHIFT, PENDING, UNMAPPED, USED, Block, FreeSet
from memwall.predict.cuda_allocator.release import collect_garbage, release_all, release_available
from memwall.predict.cuda_allocator.rounding import (
    MAX_REQUEST_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    allocation_bytes,
    rounded_bytes,
)
from memwall.predict.cuda_allocator.state import AllocatorState


class CudaAllocator(AllocatorState):
    """Simulates the allocator of one device.

    The settings are taken as they are: `allocator_settings.parse_settings` refuses those that torch would refuse.
    """

    def malloc(self, request_bytes: int, stream: int = 0) -> Block | None:
        """Returns the block that a request of at least one byte gets; None if memory is out."""
        if self.has_divisions or request_bytes <= 0:
            size = self._rounded(request_bytes)
        else:
            size = -(-request_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        if size >= MAX_REQUEST_BYTES:
            return None
        is_small = size <= SMALL_LIMIT_BYTES
        pool = self.small if is_small else self.large
        home = pool.free_sets.get(stream) or pool.free_set(stream)
        keys = home.keys
        index = bisect_left(keys, size << KEY_SHIFT)
        is_expanding = self.settings.expandable_segments
        if not self.is_plain:
            index = self._choose(home, index, size)
        block: Block | None
        if index < len(keys):
            block = home.blocks[index]
            del keys[index], home.blocks[index]
        else:
            block = self._grow(home, size)
            if block is None:
                return None
            index = len(keys)

        rest = block.size - size
        if rest and (
            rest >= MIN_BLOCK_BYTES
            if is_small or is_expanding
            else rest > SMALL_LIMIT_BYTES and size < self.max_split_bytes
        ):
            remainder = block
            self.num_blocks_created = number = self.num_blocks_created + 1
            block = Block(remainder.start, size, USED, home, remainder.segment, number)
            prev = remainder.prev
            block.prev = prev
            if prev is not None:
                prev.next = block
            block.next = remainder
            remainder.prev = block
            remainder.start += size
            remainder.size = rest
            key = rest << KEY_SHIFT | (remainder.number if self.is_by_number else remainder.start)
            place = bisect_left(keys, key, 0, index)
            keys.insert(place, key)
            home.blocks.insert(place, remainder)
            remainder.gc_base = pool.num_searches
        else:
            block.state = USED

        self.allocated_bytes = now = self.allocated_bytes + block.size
        if now > self.allocated_peak_bytes:
            self.allocated_peak_bytes = now
        return block

    def free(self, block: Block, *, is_awaited: bool = False) -> None:
        """Takes a block back.

        Args:
            is_awaited: another stream still uses it, so that it is free when `complete` says so, or when memory is out.
        """
        self.allocated_bytes -= block.size
        if is_awaited:
            block.state = PENDING
            self.pending[block] = None
        else:
            self.complete(block)

    def complete(self, block: Block) -> None:
        """Makes a block free that nothing uses any more: merges it with free neighbours and puts it back."""
        if self.pending:
            self.pending.pop(block, None)
        home = block.home
        keys, blocks = home.keys, home.blocks
        is_by_number = self.is_by_number
        whole = block.size
        prev = block.prev
        if prev is not None and prev.state == FREE:
            merged = prev.size
            place = bisect_left(keys, merged << KEY_SHIFT | (prev.number if is_by_number else prev.start))
            del keys[place], blocks[place]
            whole += merged
            block.start = prev.start
            block.prev = prev = prev.prev
            if prev is not None:
                prev.next = block
        following = block.next
        if following is not None and following.state == FREE:
            merged = following.size
            place = bisect_left(keys, merged << KEY_SHIFT | (following.number if is_by_number else following.start))
            del keys[place], blocks[place]
            whole += merged
            block.next = following = following.next
            if following is not None:
                following.prev = block
        block.size = whole
        block.state = FREE
        key = whole << KEY_SHIFT | (block.number if is_by_number else block.start)
        place = bisect_left(keys, key)
        keys.insert(place, key)
        blocks.insert(place, block)
        block.gc_base = home.pool.num_searches

    def synchronize(self) -> None:
        """Waits for every other stream, so that all pending frees complete."""
        for block in list(self.pending):
            self.complete(block)

    def empty_cache(self) -> None:
        """Waits for all streams and gives back what is cached."""
        self.synchronize()
        release_all(self)

    def _rounded(self, request_bytes: int) -> int:
        if request_bytes <= 0:
            raise UsageError(f"a request of {request_bytes} bytes never reaches the allocator")
        return request_bytes if request_bytes >= MAX_REQUEST_BYTES else rounded_bytes(request_bytes, self.settings)

    def _choose(self, home: FreeSet, index: int, size: int) -> int:
        """Returns where the search ends that found its first large enough block at `index`.

        The length of the set means nowhere.
        """
        if self.counts_searches:
            home.pool.num_searches += 1
        blocks = home.blocks
        end = len(blocks)
        if index < end and blocks[index].segment.is_expandable:
            if self.settings.expandable_segments:
                following = blocks[index].next
                if following is not None and following.state == UNMAPPED:
                    index = _closed_hole(blocks, index)
            else:
                index += 1
                while index < end and blocks[index].segment.is_expandable:
                    index += 1
        if index >= end:
            return end
        found = blocks[index].size
        limit = self.max_split_bytes
        if found >= limit if size < limit else found >= size + self.settings.slack_bytes:
            return end
        return index

    def _grow(self, home: FreeSet, size: int) -> Block | None:
        """Asks the device, where no cached block fits; if it has nothing, gives cached memory back and asks again."""
        segment_bytes = allocation_bytes(size, self.settings)
        if self.counts_searches:
            collect_garbage(self)
        if self._is_rejected(segment_bytes):
            return None
        block = self._allocate(home, size, segment_bytes)
        if block is None and release_available(self, size, home):
            block = self._allocate(home, size, segment_bytes)
        if block is None:
            self.synchronize()
            release_all(self)
            self.num_alloc_retries += 1
            block = self._allocate(home, size, segment_bytes)
        return block

    def _allocate(self, home: FreeSet, size: int, segment_bytes: int) -> Block | None:
        if self._is_beyond_limit(segment_bytes):
            return None
        if not self.settings.expandable_segments:
            return self.device_malloc(segment_bytes, home)
        return expandable.allocate(self, size, home)

    def _is_beyond_limit(self, segment_bytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes

    def _is_rejected(self, segment_bytes: int) -> bool:
        """Tells whether the request is refused at once.

        One beyond the limit is not: for that, memory is released first.
        """
        if not self.settings.throw_on_cudamalloc_oom or self._is_beyond_limit(segment_bytes):
            return False
        fraction = self.settings.per_process_memory_fraction or 1.0
        return self.reserved_bytes + segment_bytes > int(fraction * self.total_bytes)


def _closed_hole(blocks: list[Block], index: int) -> int:
    """Returns where a search that began at `index` ends.

    It moves on while the next block, with room to grow, is smaller.
    """
    room = _room(blocks[index])
    while (
        blocks[index].segment.is_expandable
        and index + 1 < len(blocks)
        and (next_room := _room(blocks[index + 1])) < room
    ):
        index, room = index + 1, next_room
    return index


def _room(block: Block) -> int:
    """Returns the bytes of a block and of the unmapped ones right behind it."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)
