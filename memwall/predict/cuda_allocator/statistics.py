"""The allocator's statistics in full: what `torch.cuda.memory_stats()` shows, and the trace of a snapshot."""

from typing import Literal, get_args

__all__ = ["PoolStatistics", "Quantity", "TraceEntry"]

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
    """Each quantity over all pools, the small ones and the large ones: current, peak, and both running sums."""

    def __init__(self) -> None:
        self._figures = {(scope, quantity): _Figure() for scope in _SCOPES for quantity in _QUANTITIES}
        self.trace: list[TraceEntry] = []

    def change(self, quantity: Quantity, is_small: bool, amount: int) -> None:
        """Adds an amount to a quantity of the small or the large pool."""
        self._figures["all", quantity].change(amount)
        self._figures["small_pool" if is_small else "large_pool", quantity].change(amount)

    def log(self, action: str, address: int, nbytes: int, stream: int) -> None:
        """Adds one entry of the trace."""
        self.trace.append((action, address, nbytes, stream))

    def as_dict(self) -> dict[str, int]:
        """Flat names such as `active_bytes.large_pool.peak`, as torch gives them."""
        return {
            f"{quantity}.{scope}.{part}": getattr(figure, part)
            for (scope, quantity), figure in self._figures.items()
            for part in ("current", "peak", "allocated", "freed")
        }
