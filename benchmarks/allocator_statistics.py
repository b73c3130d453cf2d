"""The simulated allocator with statistics: what `torch.cuda.memory_stats()` shows, and the trace of a snapshot."""

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from memwall.errors import UsageError
from memwall.predict.cuda_allocator.memory_blocks import Block, FreeSet, Segment
from memwall.predict.cuda_allocator.rounding import MAX_REQUEST_BYTES
from memwall.predict.cuda_allocator.simulator import CudaAllocator

__all__ = ["PoolStatistics", "TraceEntry", "WatchedAllocator", "recorded_addresses"]

Quantity = Literal[
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
]
TraceEntry = tuple[str, int, int, int]
"""Action, address, bytes and stream, named and measured as in `device_traces` of a snapshot."""

_SCOPES = ("all", "small_pool", "large_pool")
_QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)


def recorded_addresses(addresses: Iterable[int]) -> Iterator[int]:
    """Yields the addresses of a recording, in the order in which its segments appeared.

    Raises:
        UsageError: more segments are asked for than the recording has.
    """
    yield from addresses
    raise UsageError("the replay asks for more segments than the recording has: its settings or requests differ")


class _Figure:
    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        self.current += amount
        if amount >= 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount


class PoolStatistics:
    """Holds each quantity over all pools, the small ones and the large ones: current, peak, and both running sums."""

    def __init__(self) -> None:
        self._figures = {(scope, quantity): _Figure() for scope in _SCOPES for quantity in _QUANTITIES}
        self.trace: list[TraceEntry] = []

    def change(self, quantity: Quantity, is_small: bool, amount: int) -> None:
        """Adds an amount to a quantity of the small or the large pool."""
        self._figures["all", quantity].change(amount)
        self._figures["small_pool" if is_small else "large_pool", quantity].change(amount)

    def current(self, quantity: Quantity, *, is_small: bool) -> int:
        """Returns a quantity of the small or the large pool as it is now."""
        return self._figures["small_pool" if is_small else "large_pool", quantity].current

    def log(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """Adds one entry of the trace."""
        self.trace.append((action, address, nbytes, stream))

    def as_dict(self) -> dict[str, int]:
        """Returns flat names such as `active_bytes.large_pool.peak`, as torch gives them."""
        return {
            f"{quantity}.{scope}.{part}": getattr(figure, part)
            for (scope, quantity), figure in self._figures.items()
            for part in ("current", "peak", "allocated", "freed")
        }


class WatchedAllocator(CudaAllocator):
    """Counts what torch counts, at the moments at which torch does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.statistics = PoolStatistics()
        self.num_ooms = self.num_sync_all_streams = self.num_device_alloc = self.num_device_free = 0
        self.num_oversize_allocations = self.num_oversize_segments = 0
        self.requested: dict[Block, int] = {}
        """By block in use or awaited."""
        self._was_rejected = False
        super().__init__(*args, **options)

    def malloc(self, request_bytes: int, stream: int = 0) -> Block | None:
        """Counts the block, or the failure."""
        block = super().malloc(request_bytes, stream)
        if block is None:
            size = self._rounded(request_bytes)
            # What is refused at once is no failure in torch's sense.
            if not self._was_rejected and size < MAX_REQUEST_BYTES:
                self.num_ooms += 1
                self.statistics.log("oom", self.total_bytes - self.reserved_bytes, size, stream)
            return None
        self.requested[block] = request_bytes
        is_small = block.home.pool.is_small
        self._allocated(block, 1)
        self.statistics.change("active", is_small, 1)
        self.statistics.change("active_bytes", is_small, block.size)
        self.statistics.change("requested_bytes", is_small, request_bytes)
        self._count_splits(is_small)
        self.statistics.log("alloc", block.address, request_bytes, block.home.stream)
        return block

    def free(self, block: Block, *, is_awaited: bool = False) -> None:
        """Counts the request."""
        self._allocated(block, -1)
        self.statistics.log("free_requested", block.address, self.requested[block], block.home.stream)
        super().free(block, is_awaited=is_awaited)

    def complete(self, block: Block) -> None:
        """Counts what is free from now on."""
        is_small, address, size, request_bytes = (
            block.home.pool.is_small,
            block.address,
            block.size,
            self.requested.pop(block),
        )
        super().complete(block)
        self.statistics.change("active", is_small, -1)
        self.statistics.change("active_bytes", is_small, -size)
        self.statistics.change("requested_bytes", is_small, -request_bytes)
        self._count_splits(is_small)
        self.statistics.log("free_completed", address, request_bytes, block.home.stream)

    def synchronize(self) -> None:
        """Counts the waiting."""
        self.num_sync_all_streams += 1
        super().synchronize()

    def reserve(self, address: int, nbytes: int, home: FreeSet, segment: Segment) -> None:
        """Counts device memory."""
        super().reserve(address, nbytes, home, segment)
        self.num_device_alloc += 1
        self.statistics.change("reserved_bytes", home.pool.is_small, nbytes)
        self._log_segment("segment_map" if segment.is_expandable else "segment_alloc", address, nbytes, home)

    def unreserve(self, address: int, nbytes: int, home: FreeSet, segment: Segment) -> None:
        """Counts what is given back."""
        super().unreserve(address, nbytes, home, segment)
        self.num_device_free += 1
        self.statistics.change("reserved_bytes", home.pool.is_small, -nbytes)
        self._log_segment("segment_unmap" if segment.is_expandable else "segment_free", address, nbytes, home)

    def _is_rejected(self, segment_bytes: int) -> bool:
        self._was_rejected = super()._is_rejected(segment_bytes)
        return self._was_rejected

    def _log_segment(self, action: str, address: int, nbytes: int, home: FreeSet) -> None:
        sign = {"segment_alloc": 1, "segment_free": -1}.get(action, 0)
        if sign:
            self.statistics.change("segment", home.pool.is_small, sign)
            self.num_oversize_segments += sign * (nbytes >= self.max_split_bytes)
        self.statistics.log(action, address, nbytes, home.stream)

    def _allocated(self, block: Block, sign: int) -> None:
        is_small = block.home.pool.is_small
        self.num_oversize_allocations += sign * (block.size >= self.max_split_bytes)
        self.statistics.change("allocation", is_small, sign)
        self.statistics.change("allocated_bytes", is_small, sign * block.size)

    def _count_splits(self, is_small: bool) -> None:
        """Counts anew the free blocks that share their classic segment with others."""
        pool = self.small if is_small else self.large
        split = [block.size for block in pool.in_order() if block.is_split and not block.segment.is_expandable]
        for quantity, now in (("inactive_split", len(split)), ("inactive_split_bytes", sum(split))):
            self.statistics.change(quantity, is_small, now - self.statistics.current(quantity, is_small=is_small))
