"""Measures what an operator allocates for itself while it runs: for convolutions as much as a result.

The allocator reports every allocation to torch's legacy profiler, which is cheap to switch on around one operator
(about 0.1 ms). Each operator is measured once for each set of dtypes, shapes and strides.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.profiler import (
    begin_watching_allocations,
    end_watching_allocations,
    has_allocation_events,
)

_log = logging.getLogger(__name__)

# Smaller inputs than this have no workspace worth measuring.
_LEAST_BYTES = 4 << 10


class AheadOfResults(int):
    """Holds the bytes of a block that an operator allocates ahead of its results, such as a copy of an argument."""


class BeforeLastResult(int):
    """Holds the bytes of a block that an operator allocates when all its results are there but the last."""


class Workspace:
    """Holds the highest bytes of one run of an operator beyond what it began with, results included.

    Args:
        blocks: what it allocates besides its results, in bytes, where that is known before it runs.
    """

    __slots__ = ("blocks", "peak_bytes")

    def __init__(self, blocks: tuple[int, ...] | None) -> None:
        self.blocks = blocks
        self.peak_bytes = 0

    @property
    def ahead(self) -> tuple[int, ...]:
        """Returns the bytes of each block that comes ahead of the results; of measured ones none is known to."""
        return tuple(block for block in self.blocks or () if isinstance(block, AheadOfResults))

    @property
    def before_last(self) -> tuple[int, ...]:
        """Returns the bytes of each block that comes before the last result."""
        return tuple(block for block in self.blocks or () if isinstance(block, BeforeLastResult))

    def beyond(self, result_bytes: int) -> tuple[int, ...]:
        """Returns the bytes of each block that follows the results; of measured ones as one, settled at once."""
        if self.blocks is None:
            self.blocks = (max(0, self.peak_bytes - result_bytes),)
        return tuple(block for block in self.blocks if not isinstance(block, (AheadOfResults, BeforeLastResult)))


class Workspaces:
    """Holds measured workspaces by operator and the layout of its inputs.

    Args:
        is_available: whether operators compute at all; on fake tensors there is nothing to measure.
    """

    def __init__(self, *, is_available: bool = True) -> None:
        self.known: dict[tuple[Any, ...], Workspace] = {}
        self._is_available = is_available and has_allocation_events
        if is_available and not has_allocation_events:
            _log.warning(
                "what operators allocate for themselves is not available with torch %s, and counts as 0 bytes: peaks "
                "are predicted lower than they are, of convolutions above all",
                torch.__version__,
            )

    @contextmanager
    def measuring(
        self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Workspace]:
        """Runs an operator, with the allocator watched if their layout is new."""
        if not self._is_available or not self.is_worth(inputs):
            yield Workspace(())
            return
        key = self.key_of(func, inputs)
        del inputs, args, kwargs  # an operator that lets go of them while it runs needs less
        known = self.known.get(key)
        if known is not None:
            yield known
            return
        workspace = Workspace(None)
        if not begin_watching_allocations():  # the script runs a profiler of its own
            self._is_available = False
            yield Workspace(())
            return
        try:
            yield workspace
        finally:
            live_bytes = 0
            for num_bytes in end_watching_allocations():
                live_bytes += num_bytes
                workspace.peak_bytes = max(workspace.peak_bytes, live_bytes)
            self.known[key] = workspace

    def in_pieces(self, func: Any) -> Callable[..., Any] | None:
        """Returns what runs an operator as several, between which it lets go of memory; None where it is one.

        It is called with what runs and records an operator, `(func, args, kwargs) -> out`, and with the arguments.
        """
        return None

    def in_order(self, func: Any, results: list[Tensor]) -> list[Tensor]:
        """Returns an operator's results in the order in which they are allocated: as they are returned, by default."""
        return results

    @staticmethod
    def key_of(func: Any, inputs: list[Tensor]) -> tuple[Any, ...]:
        """Calls with the same key need the same: a product copies an operand whose layout it cannot read."""
        return (func, *((t.dtype, t.shape, t.stride() if t.layout is torch.strided else ()) for t in inputs))

    @staticmethod
    def is_worth(inputs: list[Tensor]) -> bool:
        """Returns whether an operator on these tensors can have a workspace worth measuring."""
        sizes = [tensor.nbytes for tensor in inputs if tensor.layout is torch.strided]
        return bool(sizes) and inputs[0].device.type == "cpu" and max(sizes) >= _LEAST_BYTES
