"""What the simulated allocator holds: pools, counters, bounds, and the steps that get memory or give it back."""

from collections import deque
from collections.abc import Iterator

from memwall.predict.cuda_allocator.addresses import placed_addresses
from memwall.predict.cuda_allocator.allocator_settings import AllocatorSettings
from memwall.predict.cuda_allocator.memory_blocks import FREE, Block, FreeSet, Pool, PrivatePool, Segment
from memwall.predict.cuda_allocator.rounding import MAX_REQUEST_BYTES
from memwall.predict.cuda_allocator.statistics import PoolStatistics
from memwall.predict.cuda_allocator.torch_releases import VersionProfile

__all__ = ["AllocatorState", "PeakExceeded", "PendingUse"]

_UNLIMITED_TOTAL_BYTES = 1 << 42
_SEGMENT_BITS = 44


class PeakExceeded(Exception):
    """Reserved memory went above what the caller still cares about."""


class PendingUse:
    """A block that was freed while one other stream may still use it."""

    __slots__ = ("block", "is_finished")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.is_finished = False


class AllocatorState:
    """Memory of one device: current figures and their peaks are plain attributes, all in bytes or counts.

    Args:
        capacity_bytes: memory that the device can give; None: without end.
        total_bytes: the device's whole memory, of which fractions are taken; default: the capacity.
        limit_bytes: what the process may reserve; None: no limit.
        addresses: addresses of new segments in turn.
        statistics: kept in full detail if given; costs time.
    """

    def __init__(
        self,
        settings: AllocatorSettings,
        profile: VersionProfile,
        *,
        capacity_bytes: int | None = None,
        total_bytes: int | None = None,
        limit_bytes: int | None = None,
        addresses: Iterator[int] | None = None,
        statistics: PoolStatistics | None = None,
    ) -> None:
        self.settings = settings
        self.profile = profile
        self.capacity_bytes = capacity_bytes
        self.total_bytes = total_bytes or capacity_bytes or _UNLIMITED_TOTAL_BYTES
        self.limit_bytes = limit_bytes
        self.addresses = addresses or placed_addresses("ascending")
        self.statistics = statistics
        self.abort_above_bytes: int | None = None
        self.is_by_number = profile.tie == "block"
        self.small = Pool(is_small=True, is_by_number=self.is_by_number)
        self.large = Pool(is_small=False, is_by_number=self.is_by_number)
        self.private_pools: dict[int, PrivatePool] = {}
        self.routes: list[PrivatePool] = []
        self.is_capturing = False
        self.uses: dict[int, deque[PendingUse]] = {}
        self.deferred: list[Block] = []
        self.captured_streams: dict[Block, list[int]] = {}
        self.num_blocks_created = 0
        self.num_segments_created = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.active_bytes = self.active_peak_bytes = self.active_at_reserved_peak_bytes = 0
        self.requested_bytes = self.requested_peak_bytes = 0
        self.num_segments = 0
        self.num_splits = self.num_splits_peak = 0
        self.split_bytes = self.split_peak_bytes = 0
        self.num_alloc_retries = self.num_ooms = self.num_oom_rejections = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.num_oversize_allocations = self.num_oversize_segments = 0

        self.has_expandable = False
        self.rounded: dict[int, int] = {}
        self.set_settings(settings)
        if limit_bytes is None and settings.per_process_memory_fraction is not None:
            self.set_memory_fraction(settings.per_process_memory_fraction)

    def set_settings(self, settings: AllocatorSettings) -> None:
        """Changes settings between two calls, as the setter of a running process does."""
        self.settings = settings
        self.rounded.clear()
        self.has_divisions = any(settings.roundup_power2_divisions)
        self.max_split_bytes = MAX_REQUEST_BYTES if settings.max_split_bytes is None else settings.max_split_bytes
        self._update_search()

    def set_memory_fraction(self, fraction: float) -> None:
        """Limits reserved memory to a share of the device's."""
        is_none = fraction == 1.0 and not self.profile.limit_holds_at_one
        self.limit_bytes = None if is_none else int(fraction * self.total_bytes)
        self._update_search()

    def _update_search(self) -> None:
        self.counts_searches = self.limit_bytes is not None and self.settings.garbage_collection_threshold > 0
        """Whether ages of free blocks are counted: garbage collection needs a limit."""
        has_expandable = self.settings.expandable_segments or self.has_expandable
        self.is_plain = not has_expandable and self.settings.max_split_bytes is None and not self.counts_searches
        """Whether a search ends at the first block that is large enough."""

    def new_block(self, start: int, size: int, state: int, home: FreeSet, segment: Segment) -> Block:
        """A block with the next number; it belongs to no set yet."""
        self.num_blocks_created += 1
        return Block(start, size, state, home, segment, self.num_blocks_created)

    def new_segment(self, nbytes: int, granule_bytes: int) -> Segment:
        """A device malloc, or a reservation if it has a granule."""
        return self.place_segment(nbytes, granule_bytes, next(self.addresses))

    def place_segment(self, nbytes: int, granule_bytes: int, address: int) -> Segment:
        """The same at a known address."""
        self.num_segments_created += 1
        number = self.num_segments_created
        start = number << _SEGMENT_BITS if self.profile.tie == "segment" else address
        return Segment(number, nbytes, address, start, granule_bytes)

    def has_room(self, nbytes: int) -> bool:
        """Whether the device can give so much more."""
        return self.capacity_bytes is None or self.reserved_bytes + nbytes <= self.capacity_bytes

    def reserve(self, nbytes: int, pool: Pool) -> None:
        """Counts memory that the device gave.

        Raises:
            PeakExceeded: reserved memory is above `abort_above_bytes`.
        """
        self.reserved_bytes += nbytes
        self.num_device_alloc += 1
        if self.reserved_bytes > self.reserved_peak_bytes:
            self.reserved_peak_bytes = self.reserved_bytes
            if self.abort_above_bytes is not None and self.reserved_bytes > self.abort_above_bytes:
                raise PeakExceeded
        if self.statistics is not None:
            self.statistics.change("reserved_bytes", pool.is_small, nbytes)

    def unreserve(self, nbytes: int, pool: Pool) -> None:
        """Counts memory given back to the device."""
        self.reserved_bytes -= nbytes
        self.num_device_free += 1
        if self.statistics is not None:
            self.statistics.change("reserved_bytes", pool.is_small, -nbytes)

    def device_malloc(self, nbytes: int, home: FreeSet) -> Block | None:
        """A segment of its own, as one free block outside the free set; None if the device has no room."""
        if not self.has_room(nbytes):
            return None
        self.reserve(nbytes, home.pool)
        self.num_segments += 1
        if nbytes >= self.max_split_bytes:
            self.num_oversize_segments += 1
        segment = self.new_segment(nbytes, 0)
        if self.statistics is not None:
            self.statistics.change("segment", home.pool.is_small, 1)
            self.statistics.log("segment_alloc", segment.address, nbytes, home.stream)
        return self.new_block(segment.start, nbytes, FREE, home, segment)

    def release_segment(self, block: Block) -> None:
        """Gives the segment of an unsplit free block back to the device."""
        home = block.home
        home.remove(block)
        self.unreserve(block.size, home.pool)
        self.num_segments -= 1
        if block.size >= self.max_split_bytes:
            self.num_oversize_segments -= 1
        if self.statistics is not None:
            self.statistics.change("segment", home.pool.is_small, -1)
            self.statistics.log("segment_free", block.address, block.size, home.stream)
