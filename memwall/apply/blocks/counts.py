"""Counts what goes through the wrapper of a block: calls, runs, and what became of the tensors that it saved."""

from collections.abc import Callable
from typing import Any


class BlockCounts:
    """Counts for one block since its plan was applied; calls without gradients do not count."""

    __slots__ = (
        "dropped",
        "num_calls",
        "num_immovable",
        "num_in_backward",
        "num_moved",
        "num_offered",
        "num_runs",
        "stays",
    )

    def __init__(self) -> None:
        self.num_calls = 0
        """Counts calls of the wrapper."""
        self.num_in_backward = 0
        """Counts those of them from within a backward pass."""
        self.num_runs = 0
        """Counts runs of a recomputed block's own forward."""
        self.dropped = ""
        """Says why it is not recomputed although the plan says so."""
        self.stays = ""
        """Says why what it saves stays although the plan moves it."""
        self.num_offered = 0
        """Counts saved tensors that came by the offload's hooks."""
        self.num_moved = 0
        """Counts those of them that left."""
        self.num_immovable = 0
        """Counts those of them that are large enough but cannot leave: of a subclass, sparse, on another device."""

    @property
    def num_reruns(self) -> int:
        """Returns how many recomputations have begun."""
        return max(0, self.num_runs - self.num_calls)

    def counting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the forward, with each run of it counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_runs += 1
            return forward(*args, **kwargs)

        return counted
