"""Blocks, segments, and the ordered sets that free blocks wait in."""

from bisect import bisect_left

USED, FREE, PENDING, UNMAPPED = 0, 1, 2, 3
"""States of a block: handed out, free and backed by memory, freed but awaited by another stream, not backed."""

KEY_SHIFT = 72
"""A key of a free set is `size << KEY_SHIFT | tie`: one integer, because a search mostly compares keys."""


class Segment:
    """Holds one device malloc, or one virtual reservation that memory is mapped into piece by piece."""

    __slots__ = ("address", "granule_bytes", "is_expandable", "nbytes", "start")

    def __init__(self, nbytes: int, address: int, start: int, granule_bytes: int) -> None:
        self.nbytes = nbytes
        self.address = address
        """Where the device put it."""
        self.start = start
        """Where it begins in the order that decides ties; `address` if addresses decide."""
        self.granule_bytes = granule_bytes
        """Unit of mapping; 0 unless expandable."""
        self.is_expandable = granule_bytes > 0


class Block:
    """Describes a piece of a segment, linked with its neighbours there."""

    __slots__ = ("gc_base", "home", "next", "number", "prev", "segment", "size", "start", "state")

    def __init__(self, start: int, size: int, state: int, home: "FreeSet", segment: Segment, number: int) -> None:
        self.start = start
        self.size = size
        self.state = state
        self.home = home
        """Free set of its pool and stream."""
        self.segment = segment
        self.number = number
        """When it was created, counted over all blocks."""
        self.prev: Block | None = None
        self.next: Block | None = None
        self.gc_base = 0
        """Searches that its pool had seen when it became free."""

    @property
    def address(self) -> int:
        """Returns where it lies on the device."""
        return self.segment.address + self.start - self.segment.start

    @property
    def is_split(self) -> bool:
        """Tells whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None


class FreeSet:
    """Keeps the free blocks of one pool and stream by size and then by tie, and the unmapped ones by address."""

    __slots__ = ("blocks", "is_by_number", "keys", "pool", "stream", "unmapped", "unmapped_addresses")

    def __init__(self, pool: "Pool", stream: int, is_by_number: bool) -> None:
        self.pool = pool
        self.stream = stream
        self.is_by_number = is_by_number
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped_addresses: list[int] = []
        self.unmapped: list[Block] = []

    def key(self, block: Block) -> int:
        """Returns where a block belongs in the order."""
        return block.size << KEY_SHIFT | (block.number if self.is_by_number else block.start)

    def insert(self, block: Block) -> None:
        """Adds a free, mapped block."""
        key = self.key(block)
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)
        block.gc_base = self.pool.num_searches

    def remove(self, block: Block) -> None:
        """Takes a free, mapped block out; its size, place and number are still those it was added with."""
        index = bisect_left(self.keys, self.key(block))
        del self.keys[index], self.blocks[index]

    def insert_unmapped(self, block: Block) -> None:
        """Adds a block without memory behind it."""
        index = bisect_left(self.unmapped_addresses, block.address)
        self.unmapped_addresses.insert(index, block.address)
        self.unmapped.insert(index, block)

    def remove_unmapped(self, block: Block) -> None:
        """Takes a block out that is about to get memory, or to be merged."""
        index = bisect_left(self.unmapped_addresses, block.address)
        del self.unmapped_addresses[index], self.unmapped[index]


class Pool:
    """Holds the small or the large blocks of all streams."""

    __slots__ = ("free_sets", "is_by_number", "is_small", "num_searches")

    def __init__(self, *, is_small: bool, is_by_number: bool) -> None:
        self.is_small = is_small
        self.is_by_number = is_by_number
        self.free_sets: dict[int, FreeSet] = {}
        self.num_searches = 0
        """Searches of this pool so far, counted while garbage collection is on: the clock of its ages."""

    def free_set(self, stream: int) -> FreeSet:
        """Returns the free blocks of a stream."""
        found = self.free_sets.get(stream)
        if found is None:
            found = self.free_sets[stream] = FreeSet(self, stream, self.is_by_number)
        return found

    def in_order(self) -> list[Block]:
        """Returns all free, mapped blocks: by stream, size and tie."""
        return [block for stream in sorted(self.free_sets) for block in self.free_sets[stream].blocks]
