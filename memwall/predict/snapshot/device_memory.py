"""Memory of one device at one moment of a snapshot's history, changed by one event after the other.

Only used blocks are tracked: what is free is what lies between them, because the allocator merges neighbouring free
blocks.
"""

from bisect import bisect_left, bisect_right, insort

from msgspec.structs import replace

from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.held_blocks import Held, Range, UsedBlock
from memwall.predict.cuda_allocator.rounding import (
    MAX_REQUEST_BYTES,
    SMALL_BUFFER_BYTES,
    SMALL_LIMIT_BYTES,
    rounded_bytes,
)
from memwall.trace.snapshot.records import Event


class MemoryState:
    """Holds the memory of one device at one moment; changes with every event applied.

    Args:
        rules: how the allocator rounds and splits.
    """

    def __init__(self, held: Held, rules: AllocatorSettings) -> None:
        self.num_unmatched = 0
        self.reserved_bytes = 0
        self.allocated_bytes = 0
        self.active_bytes = 0
        self.split_free_bytes = 0
        """Free bytes of segments that are partly in use (torch's inactive_split)."""
        self.expandable_free_bytes = 0
        self.idle_bytes = 0
        """Segments without a used block: what `empty_cache` would return."""
        self._rules = rules
        self._ranges: dict[int, Range] = {}
        self._range_starts: list[int] = []
        self._range_used: dict[int, int] = {}
        self._blocks: dict[int, UsedBlock] = {}
        self._block_starts: list[int] = []
        for memory in held.ranges:
            self.add_range(memory)
        for block in held.blocks:
            self.add_block(block)

    @property
    def held(self) -> Held:
        """Returns what is held and what of it is in use."""
        return Held(
            ranges=tuple(self._ranges[start] for start in self._range_starts),
            blocks=tuple(self._blocks[start] for start in self._block_starts),
        )

    def apply(self, event: Event, exact_bytes: int | None = None) -> None:
        """Carries out one event."""
        match event.action:
            case "alloc":
                self._allocate(event, exact_bytes)
            case "free_requested":
                block = self._blocks.get(event.address)
                if block is None or block.is_pending:
                    self.num_unmatched += 1
                else:
                    self._blocks[event.address] = replace(block, is_pending=True)
                    self.allocated_bytes -= block.num_bytes
            case "free_completed":
                if self.remove_block(event.address) is None:
                    self.num_unmatched += 1
            case "segment_alloc" | "segment_map":
                self.add_range(range_of(event))
            case "segment_free" | "segment_unmap":
                self.cut_range(event.address, event.num_bytes)

    def block_bytes(self, address: int, requested_bytes: int) -> int:
        """Returns the size of the block that the allocator hands out at an address, in the present state.

        Rounded as requests are; whatever is left of the free block and may not be split off belongs to it, too
        (`should_split`: remainders up to 1 MiB of the large pool, everything from `max_split_size` on).
        """
        nbytes = rounded_bytes(requested_bytes, self._rules)
        held = self.range_at(address)
        if held is None or held.is_expandable or held.is_small:
            return nbytes
        position = bisect_right(self._block_starts, address)
        end = self._block_starts[position] if position < len(self._block_starts) else held.end
        rest_bytes = min(end, held.end) - address - nbytes
        is_whole = rest_bytes <= SMALL_LIMIT_BYTES or nbytes >= (self._rules.max_split_bytes or MAX_REQUEST_BYTES)
        return nbytes + rest_bytes if rest_bytes > 0 and is_whole else nbytes

    def range_at(self, address: int) -> Range | None:
        """Returns the memory an address lies in."""
        position = bisect_right(self._range_starts, address) - 1
        held = self._ranges[self._range_starts[position]] if position >= 0 else None
        return held if held is not None and address < held.end else None

    def add_block(self, block: UsedBlock) -> None:
        """Takes a block into use; one at the same address gives way."""
        if self.remove_block(block.address) is not None:
            self.num_unmatched += 1
        self._blocks[block.address] = block
        insort(self._block_starts, block.address)
        self.active_bytes += block.num_bytes
        self.allocated_bytes += 0 if block.is_pending else block.num_bytes
        self._use(block.address, block.num_bytes)

    def remove_block(self, address: int) -> UsedBlock | None:
        """Frees and returns a block; None if there was none."""
        block = self._blocks.pop(address, None)
        if block is not None:
            del self._block_starts[bisect_left(self._block_starts, address)]
            self.active_bytes -= block.num_bytes
            self.allocated_bytes -= 0 if block.is_pending else block.num_bytes
            self._use(address, -block.num_bytes)
        return block

    def add_range(self, added: Range) -> None:
        """Takes device memory; stretches of an expandable segment that touch become one."""
        if added.num_bytes <= 0:
            return
        self._make_room(added)
        used_bytes = self._used_within(added)
        if added.is_expandable:
            for neighbour in (self.range_at(added.address - 1), self.range_at(added.end)):
                if neighbour is not None and neighbour.is_expandable and neighbour.stream == added.stream:
                    used_bytes += self._range_used[neighbour.address]
                    self._drop_range(neighbour)
                    start = min(neighbour.address, added.address)
                    added = replace(added, address=start, num_bytes=added.num_bytes + neighbour.num_bytes)
        self._ranges[added.address] = added
        insort(self._range_starts, added.address)
        self.reserved_bytes += added.num_bytes
        self._range_used[added.address] = used_bytes
        self._count(added, 1)

    def cut_range(self, address: int, num_bytes: int) -> None:
        """Gives device memory back: a whole segment, or a part of an expandable one."""
        end = address + num_bytes
        held = self.range_at(address)
        if held is None or end > held.end:
            self.num_unmatched += 1
            return
        self._drop_range(held)
        for start, stop in ((held.address, address), (end, held.end)):
            self.add_range(replace(held, address=start, num_bytes=stop - start))

    def _allocate(self, event: Event, exact_bytes: int | None) -> None:
        num_bytes = self.block_bytes(event.address, event.num_bytes) if exact_bytes is None else exact_bytes
        self.add_block(
            UsedBlock(
                address=event.address,
                num_bytes=num_bytes,
                requested_bytes=event.num_bytes,
                stack=event.stack,
                category=event.category,
                is_pending=False,
                is_exact=exact_bytes is not None,
            )
        )

    def _use(self, address: int, num_bytes: int) -> None:
        held = self.range_at(address)
        if held is not None:
            self._count(held, -1)
            self._range_used[held.address] += num_bytes
            self._count(held, 1)

    def _used_within(self, held: Range) -> int:
        first, last = (bisect_left(self._block_starts, address) for address in (held.address, held.end))
        return sum(self._blocks[start].num_bytes for start in self._block_starts[first:last])

    def _make_room(self, added: Range) -> None:
        """Drops what overlaps: one end of the history does not fit the other, and the newer statement holds."""
        while True:
            position = bisect_left(self._range_starts, added.end) - 1
            held = self._ranges[self._range_starts[position]] if position >= 0 else None
            if held is None or held.end <= added.address:
                return
            self.num_unmatched += 1
            self._drop_range(held)

    def _drop_range(self, held: Range) -> None:
        self._count(held, -1)
        self.reserved_bytes -= held.num_bytes
        del self._ranges[held.address], self._range_used[held.address]
        del self._range_starts[bisect_left(self._range_starts, held.address)]

    def _count(self, held: Range, sign: int) -> None:
        used_bytes = self._range_used[held.address]
        free_bytes = sign * max(held.num_bytes - used_bytes, 0)
        if used_bytes == 0:
            self.idle_bytes += free_bytes
        elif held.is_expandable:
            self.expandable_free_bytes += free_bytes
        else:
            self.split_free_bytes += free_bytes


def range_of(event: Event) -> Range:
    """Returns the device memory that a segment event takes or gives back."""
    return Range(
        address=event.address,
        num_bytes=event.num_bytes,
        stream=event.stream,
        # An event doesn't say which pool; only the small one asks the device for exactly 2 MiB.
        is_small=event.num_bytes == SMALL_BUFFER_BYTES,
        is_expandable=event.action in ("segment_map", "segment_unmap"),
    )
