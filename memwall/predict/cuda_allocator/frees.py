"""Taking blocks back: merging, and waiting for the other streams that used them.

After `free`, `free_block`, `process_events` and `synchronize_and_free_events` of CUDACachingAllocator.cpp.
"""

from bisect import bisect_left
from collections import deque

from memwall.predict.cuda_allocator.memory_blocks import FREE, KEY_SHIFT, PENDING, Block
from memwall.predict.cuda_allocator.state import AllocatorState, PendingUse

__all__ = ["FreeingAllocator"]


class FreeingAllocator(AllocatorState):
    """The half of the allocator that takes blocks back."""

    def free(self, block: Block) -> None:
        """Takes a block back; if other streams used it, when they are done with it."""
        size = block.size
        self.allocated_bytes -= size
        if size >= self.max_split_bytes:
            self.num_oversize_allocations -= 1
        statistics = self.statistics
        if statistics is not None:
            is_small = block.home.pool.is_small
            statistics.change("allocation", is_small, -1)
            statistics.change("allocated_bytes", is_small, -size)
            statistics.log("free_requested", block.address, block.requested, block.home.stream)
        if block.extra_streams:
            block.state = PENDING
            if self.defers_frees:
                self.deferred.append(block)
            else:
                self._await_streams(block)
        else:
            self._complete(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Notes that another stream uses the block."""
        if stream == block.home.stream:
            return
        if block.extra_streams is None:
            block.extra_streams = [stream]
        elif stream not in block.extra_streams:
            block.extra_streams.append(stream)
        else:
            return
        if self.defers_frees:
            self.captured_streams.setdefault(block, []).append(stream)

    def finish(self, block: Block) -> None:
        """The other streams are done with a freed block; the allocator notices at its next chance."""
        for queue in self.uses.values():
            for use in queue:
                if use.block is block:
                    use.is_finished = True

    def finish_stream(self, stream: int) -> None:
        """A stream has done all that was issued to it so far."""
        for use in self.uses.get(stream, ()):
            use.is_finished = True

    def _complete(self, block: Block) -> None:
        """Makes a block free: merges it with free neighbours and puts it back."""
        size = block.size
        self.active_bytes -= size
        self.requested_bytes -= block.requested
        statistics = self.statistics
        address = block.address if statistics is not None else 0
        home = block.home
        keys, blocks = home.keys, home.blocks
        is_by_number = self.is_by_number
        num_merged = merged_bytes = 0
        prev = block.prev
        if prev is not None and prev.state == FREE:
            merged = prev.size
            place = bisect_left(keys, merged << KEY_SHIFT | (prev.number if is_by_number else prev.start))
            del keys[place], blocks[place]
            num_merged, merged_bytes = 1, merged
            block.start = prev.start
            block.prev = prev = prev.prev
            if prev is not None:
                prev.next = block
        following = block.next
        if following is not None and following.state == FREE:
            merged = following.size
            place = bisect_left(keys, merged << KEY_SHIFT | (following.number if is_by_number else following.start))
            del keys[place], blocks[place]
            num_merged += 1
            merged_bytes += merged
            block.next = following = following.next
            if following is not None:
                following.prev = block
        block.size = whole = size + merged_bytes
        block.state = FREE
        key = whole << KEY_SHIFT | (block.number if is_by_number else block.start)
        place = bisect_left(keys, key)
        keys.insert(place, key)
        blocks.insert(place, block)
        block.gc_base = home.pool.num_searches
        split_count = split_bytes = 0
        if not block.segment.is_expandable:
            if prev is not None or following is not None:
                split_count, split_bytes = 1 - num_merged, size
            else:
                split_count, split_bytes = -num_merged, -merged_bytes
            if split_bytes:
                self.count_splits(split_count, split_bytes)
        if statistics is not None:
            is_small = home.pool.is_small
            statistics.change("active", is_small, -1)
            statistics.change("active_bytes", is_small, -size)
            statistics.change("requested_bytes", is_small, -block.requested)
            self.record_splits(is_small, split_count, split_bytes)
            statistics.log("free_completed", address, block.requested, home.stream)

    @property
    def defers_frees(self) -> bool:
        """Whether cross-stream frees and retries wait for the end of a capture (or, once, of any routing)."""
        return self.is_capturing or (bool(self.routes) and self.profile.routing_defers_frees)

    def count_splits(self, count: int, nbytes: int) -> None:
        """Adds to the free blocks that share their (classic) segment with others."""
        self.num_splits = now = self.num_splits + count
        if now > self.num_splits_peak:
            self.num_splits_peak = now
        self.split_bytes = now = self.split_bytes + nbytes
        if now > self.split_peak_bytes:
            self.split_peak_bytes = now

    def record_splits(self, is_small: bool, split_count: int, split_bytes: int) -> None:
        """As `count_splits`, in the detailed statistics."""
        if self.statistics is not None and (split_count or split_bytes):
            self.statistics.change("inactive_split", is_small, split_count)
            self.statistics.change("inactive_split_bytes", is_small, split_bytes)

    def _await_streams(self, block: Block) -> None:
        streams = block.extra_streams or []
        block.extra_streams = None
        block.num_pending = len(streams)
        for stream in streams:
            self.uses.setdefault(stream, deque()).append(PendingUse(block))

    def process_uses(self) -> None:
        """Frees what other streams have finished with: per stream in order, up to the first unfinished use."""
        self._await_deferred()
        for stream in list(self.uses):
            queue = self.uses[stream]
            while queue and queue[0].is_finished:
                self._end_use(queue.popleft().block)
            if not queue:
                del self.uses[stream]

    def synchronize(self) -> None:
        """Waits for every other stream, so that all pending frees complete."""
        self.num_sync_all_streams += 1
        self._await_deferred()
        for queue in list(self.uses.values()):
            while queue:
                self._end_use(queue.popleft().block)
        self.uses.clear()

    def _await_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for block in deferred:
            # Uses that were captured happen when the graph runs, not now.
            captured = self.captured_streams.pop(block, [])
            block.extra_streams = [stream for stream in block.extra_streams or [] if stream not in captured]
            if block.extra_streams:
                self._await_streams(block)
            else:
                self._complete(block)

    def _end_use(self, block: Block) -> None:
        block.num_pending -= 1
        if block.num_pending == 0:
            self._complete(block)
