"""PyTorch's CUDA caching allocator, simulated: where each block goes, and what the process holds of the device.

Pure arithmetic on sizes, without torch and without a device. After `DeviceCachingAllocator` of
`c10/cuda/CUDACachingAllocator.cpp`; which releases behave how is `torch_releases.py`. Left out: free-memory
callbacks and hinted allocation. `malloc` and `free` are written out in full instead of
in pieces: they run for every event.
"""

from bisect import bisect_left

from memwall.errors import UsageError
from memwall.predict.cuda_allocator import expandable
from memwall.predict.cuda_allocator.frees import FreeingAllocator
from memwall.predict.cuda_allocator.memory_blocks import KEY_SHIFT, UNMAPPED, USED, Block, FreeSet, Pool, PrivatePool
from memwall.predict.cuda_allocator.release import collect_garbage, release_all, release_available, release_unused_pools
from memwall.predict.cuda_allocator.rounding import (
    MAX_REQUEST_BYTES,
    MIN_BLOCK_BYTES,
    SMALL_LIMIT_BYTES,
    allocation_bytes,
    rounded_bytes,
)

__all__ = ["CudaAllocator"]


class CudaAllocator(FreeingAllocator):
    """The allocator of one device.

    The settings are taken as they are: `allocator_settings.check` refuses those that torch would refuse.
    """

    def malloc(self, request_bytes: int, stream: int = 0) -> Block | None:
        """The block that a request of at least one byte gets; None if memory is out."""
        routed = self.routes[-1] if self.routes else None
        if (self.uses or self.deferred) and not self.defers_frees:
            self.process_uses()
        size = self.rounded.get(request_bytes) or self._round(request_bytes)
        if size >= MAX_REQUEST_BYTES:
            return None
        is_small = size <= SMALL_LIMIT_BYTES
        if routed is None:
            pool = self.small if is_small else self.large
        else:
            pool = routed.small if is_small else routed.large
        home = pool.free_sets.get(stream) or pool.free_set(stream)
        keys = home.keys
        index = bisect_left(keys, size << KEY_SHIFT)
        is_expanding = self.settings.expandable_segments and (routed is None or self._expands(routed))
        if not self.is_plain:
            index = self._choose(home, index, size, is_expanding)
        block: Block | None
        if index < len(keys):
            block = home.blocks[index]
            del keys[index], home.blocks[index]
            is_new = False
        else:
            block = self._grow(home, size, is_expanding)
            if block is None:
                return None
            home = block.home
            keys = home.keys
            index = len(keys)
            is_new = True

        rest = block.size - size
        was_split = block.prev is not None or block.next is not None
        if (
            rest
            and (
                rest >= MIN_BLOCK_BYTES
                if is_small or is_expanding
                else rest > SMALL_LIMIT_BYTES and size < self.max_split_bytes
            )
            and (routed is None or not (routed.is_no_split and self.profile.has_no_split))
        ):
            remainder = block
            segment = remainder.segment
            self.num_blocks_created = number = self.num_blocks_created + 1
            block = Block(remainder.start, size, USED, home, segment, number)
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
            remainder.gc_base = home.pool.num_searches
            if segment.is_expandable:
                split_count = split_bytes = 0
            elif was_split:
                split_count, split_bytes = 0, -size
            else:
                split_count, split_bytes = 1, rest
        else:
            block.state = USED
            size = block.size
            if was_split and not block.segment.is_expandable:
                split_count, split_bytes = -1, -size
            else:
                split_count = split_bytes = 0
        block.requested = request_bytes

        self.allocated_bytes = now = self.allocated_bytes + size
        if now > self.allocated_peak_bytes:
            self.allocated_peak_bytes = now
        self.active_bytes = now = self.active_bytes + size
        if now > self.active_peak_bytes:
            self.active_peak_bytes = now
        self.requested_bytes = now = self.requested_bytes + request_bytes
        if now > self.requested_peak_bytes:
            self.requested_peak_bytes = now
        if split_bytes:
            self.count_splits(split_count, split_bytes)
        if size >= self.max_split_bytes:
            self.num_oversize_allocations += 1
        if is_new and self.reserved_bytes == self.reserved_peak_bytes:
            self.active_at_reserved_peak_bytes = self.active_bytes
        if self.statistics is not None:
            self._record_malloc(block, split_count, split_bytes)
        return block

    def empty_cache(self) -> None:
        """Waits for all streams and gives back what is cached; while a graph is captured, only what nobody holds."""
        if self.defers_frees:
            release_unused_pools(self)
        else:
            self.synchronize()
            release_all(self)

    def add_pool(
        self, key: int, *, is_no_split: bool = False, has_allocator: bool = False, is_used_on_oom: bool = False
    ) -> None:
        """Makes a private pool; `key` must be new."""
        self.private_pools[key] = PrivatePool(
            is_by_number=self.is_by_number,
            is_no_split=is_no_split,
            has_allocator=has_allocator,
            is_used_on_oom=is_used_on_oom,
        )

    def begin_pool(self, key: int, *, is_capture: bool = False) -> None:
        """Routes the requests that follow into a private pool; of nested ones the innermost counts."""
        if key not in self.private_pools:
            raise UsageError(f"there is no private pool {key}; there are {sorted(self.private_pools)}")
        self.routes.append(self.private_pools[key])
        self.is_capturing = self.is_capturing or is_capture

    def end_pool(self) -> None:
        """Ends the innermost routing."""
        self.routes.pop()
        if not self.routes:
            self.is_capturing = False

    def release_pool(self, key: int) -> None:
        """Nobody holds the pool any more: from now on its free memory can be given back."""
        self.private_pools[key].is_used = False

    def _expands(self, private: PrivatePool) -> bool:
        return self.profile.expands_private_pools and not private.has_allocator

    def _round(self, request_bytes: int) -> int:
        if request_bytes <= 0:
            raise UsageError(f"a request of {request_bytes} bytes never reaches the allocator")
        if request_bytes >= MAX_REQUEST_BYTES:
            return request_bytes
        if self.has_divisions:
            size = rounded_bytes(request_bytes, self.settings)
        else:
            size = -(-request_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        self.rounded[request_bytes] = size
        return size

    def _choose(self, home: FreeSet, index: int, size: int, is_expanding: bool) -> int:
        """Where the search ends that found its first large enough block at `index`; the length of the set: nowhere."""
        if self.counts_searches:
            home.pool.num_searches += 1
        blocks = home.blocks
        end = len(blocks)
        if index < end and blocks[index].segment.is_expandable:
            if is_expanding:
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

    def _grow(self, home: FreeSet, size: int, is_expanding: bool) -> Block | None:
        """What is tried when no cached block fits, in the order of this release."""
        segment_bytes = allocation_bytes(size, self.settings)
        if self.counts_searches:
            collect_garbage(self)
        for step in self.profile.chain:
            block: Block | None = None
            if step == "allocate":
                if self._is_rejected(segment_bytes):
                    self.num_oom_rejections += 1
                    return None
                block = self._allocate(home, size, segment_bytes, is_expanding)
            elif step == "overflow":
                if home.pool.owner is None:
                    block = self._take_from_overflow(home, size)
            elif step == "release_available":
                if release_available(self, size, home):
                    block = self._allocate(home, size, segment_bytes, is_expanding)
            elif not self.defers_frees:
                self.synchronize()
                release_all(self)
                self.num_alloc_retries += 1
                block = self._allocate(home, size, segment_bytes, is_expanding)
            if block is not None:
                return block
        self.num_ooms += 1
        if self.statistics is not None:
            free_bytes = self.total_bytes - self.reserved_bytes
            self.statistics.log("oom", free_bytes, size, home.stream)
        return None

    def _allocate(self, home: FreeSet, size: int, segment_bytes: int, is_expanding: bool) -> Block | None:
        if self._is_beyond_limit(segment_bytes):
            return None
        if not is_expanding:
            return self.device_malloc(segment_bytes, home)
        self.has_expandable = True
        return expandable.allocate(self, size, home)

    def _is_beyond_limit(self, segment_bytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes

    def _is_rejected(self, segment_bytes: int) -> bool:
        """Whether the request is refused at once. One beyond the limit is not: for that, memory is released first."""
        if not self.settings.throw_on_cudamalloc_oom or self._is_beyond_limit(segment_bytes):
            return False
        fraction = self.settings.per_process_memory_fraction or 1.0
        return self.reserved_bytes + segment_bytes > int(fraction * self.total_bytes)

    def _take_from_overflow(self, home: FreeSet, size: int) -> Block | None:
        for _, private in sorted(self.private_pools.items()):
            if not private.is_used_on_oom:
                continue
            pool: Pool = private.small if home.pool.is_small else private.large
            found = pool.free_set(home.stream)
            index = self._choose(found, bisect_left(found.keys, size << KEY_SHIFT), size, is_expanding=False)
            if index < len(found.keys):
                block = found.blocks[index]
                found.remove(block)
                return block
        return None

    def _record_malloc(self, block: Block, split_count: int, split_bytes: int) -> None:
        statistics = self.statistics
        if statistics is None:
            return
        is_small = block.home.pool.is_small
        statistics.change("allocation", is_small, 1)
        statistics.change("allocated_bytes", is_small, block.size)
        statistics.change("active", is_small, 1)
        statistics.change("active_bytes", is_small, block.size)
        statistics.change("requested_bytes", is_small, block.requested)
        self.record_splits(is_small, split_count, split_bytes)
        statistics.log("alloc", block.address, block.requested, block.home.stream)


def _closed_hole(blocks: list[Block], index: int) -> int:
    """Where a search that began at `index` ends: it moves on while the next block, with room to grow, is smaller."""
    room = _room(blocks[index])
    while (
        blocks[index].segment.is_expandable
        and index + 1 < len(blocks)
        and (next_room := _room(blocks[index + 1])) < room
    ):
        index, room = index + 1, next_room
    return index


def _room(block: Block) -> int:
    """Bytes of a block and of the unmapped ones right behind it."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)
