"""The state of the simulated allocator: pools, counters, bounds, and the steps that get memory or give it back."""

from collections.abc import Iterator

from memwall.predict.cuda_allocator.addresses import placed_addresses
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.memory_blocks import FREE, Block, FreeSet, Pool, Segment
from memwall.predict.cuda_allocator.rounding import MAX_REQUEST_BYTES
from memwall.predict.cuda_allocator.torch_releases import VersionProfile

_UNLIMITED_TOTAL_BYTES = 1 << 42
_SEGMENT_BITS = 44


class PeakExceeded(Exception):
    """Reserved memory went above what the caller still cares about."""


class AllocatorState:
    """Holds the memory of one device; current figures and their peaks are plain attributes, in bytes or counts.

    Args:
        capacity_bytes: memory that the device can give; None: without end.
        total_bytes: the device's whole memory, of which fractions are taken; default: the capacity.
        addresses: addresses of new segments in turn.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        profile: VersionProfile,
        *,
        capacity_bytes: int | None = None,
        total_bytes: int | None = None,
        addresses: Iterator[int] | None = None,
    ) -> None:
        self.settings = settings
        self.profile = profile
        self.capacity_bytes = capacity_bytes
        self.total_bytes = total_bytes or capacity_bytes or _UNLIMITED_TOTAL_BYTES
        self.limit_bytes: int | None = None
        """Bytes that the process may reserve; None: no limit."""
        self.addresses = addresses or placed_addresses("ascending")
        self.abort_above_bytes: int | None = None
        self.is_by_number = profile.tie == "block"
        self.small = Pool(is_small=True, is_by_number=self.is_by_number)
        self.large = Pool(is_small=False, is_by_number=self.is_by_number)
        self.pending: dict[Block, None] = {}
        """Blocks that were freed while another stream uses them, in order."""
        self.num_blocks_created = 0
        self.num_segments_created = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.num_alloc_retries = 0
        self.num_device_calls = 0
        """Mallocs, frees, maps and unmaps."""
        self.has_expandable = False
        self.has_divisions = any(settings.roundup_power2_divisions)
        self.max_split_bytes = MAX_REQUEST_BYTES if settings.max_split_bytes is None else settings.max_split_bytes
        self.set_memory_fraction(settings.per_process_memory_fraction or 1.0)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits reserved memory to a share of the device's; 1 is no limit."""
        self.limit_bytes = None if fraction == 1 else int(fraction * self.total_bytes)
        self.update_search()

    def update_search(self) -> None:
        """Notes which parts of a search the settings, the limit and the segments so far call for."""
        self.counts_searches = self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0
        """Whether ages of free blocks are counted: garbage collection needs a limit."""
        has_expandable = self.settings.expandable_segments or self.has_expandable
        self.is_plain = not has_expandable and self.settings.max_split_bytes is None and not self.counts_searches
        """Whether a search ends at the first block that is large enough."""

    def new_block(self, start: int, size: int, state: int, home: FreeSet, segment: Segment) -> Block:
        """Returns a block with the next number; it belongs to no set yet."""
        self.num_blocks_created += 1
        return Block(start, size, state, home, segment, self.num_blocks_created)

    def new_segment(self, nbytes: int, granule_bytes: int, address: int | None = None) -> Segment:
        """Returns a device malloc, or a reservation if it has a granule; at the next address where none is given."""
        if address is None:
            address = next(self.addresses)
        self.num_segments_created += 1
        start = self.num_segments_created << _SEGMENT_BITS if self.profile.tie == "segment" else address
        return Segment(nbytes, address, start, granule_bytes)

    def has_room(self, nbytes: int) -> bool:
        """Tells whether the device can give so much more."""
        return self.capacity_bytes is None or self.reserved_bytes + nbytes <= self.capacity_bytes

    def reserve(self, address: int, nbytes: int, home: FreeSet, segment: Segment) -> None:
        """Counts memory that the device gave.

        Raises:
            PeakExceeded: reserved memory is above `abort_above_bytes`.
        """
        self.reserved_bytes += nbytes
        self.num_device_calls += 1
        if self.reserved_bytes > self.reserved_peak_bytes:
            self.reserved_peak_bytes = self.reserved_bytes
            if self.abort_above_bytes is not None and self.reserved_bytes > self.abort_above_bytes:
                raise PeakExceeded

    def unreserve(self, address: int, nbytes: int, home: FreeSet, segment: Segment) -> None:
        """Counts memory given back to the device."""
        self.reserved_bytes -= nbytes
        self.num_device_calls += 1

    def device_malloc(self, nbytes: int, home: FreeSet) -> Block | None:
        """Returns a segment of its own, as one free block outside the free set; None if the device has no room."""
        if not self.has_room(nbytes):
            return None
        segment = self.new_segment(nbytes, 0)
        self.reserve(segment.address, nbytes, home, segment)
        return self.new_block(segment.start, nbytes, FREE, home, segment)

    def release_segment(self, block: Block) -> None:
        """Gives the segment of an unsplit free block back to the device."""
        block.home.remove(block)
        self.unreserve(block.address, block.size, block.home, block.segment)
