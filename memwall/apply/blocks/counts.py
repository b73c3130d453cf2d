"""What the wrapper of a block counts: calls, runs, and what became of the tensors that it saved."""

from collections.abc import Callable
from typing import Any

__all__ = ["BlockCounts"]


class BlockCounts:
    """Of one block since its plan was applied; calls without gradients do not count."""

    __slots__ = (
        "dropped",
        "num_calls",
        "num_immovable",
        "num_in_backward",
        "num_moved",
        "num_offered",
        "num_rebuilt",
        "num_runs",
    )

    def __init__(self) -> None:
        self.num_calls = 0
        """Of the wrapper."""
        self.num_in_backward = 0
        """Of these, from within a backward pass."""
        self.num_runs = 0
        """Of a recomputed block's own forward."""
        self.dropped = ""
        """Why it is not recomputed although the plan says so."""
        self.num_rebuilt = 0
        """Saved tensors that became the recipe to rebuild them."""
        self.num_offered = 0
        """Saved tensors that came by the offload's hooks."""
        self.num_moved = 0
        """Of these, those that left."""
        self.num_immovable = 0
        """Of these, those that were large enough to leave but cannot: of a subclass, sparse, on another device."""

    @property
    def num_reruns(self) -> int:
        """Recomputations that have begun."""
        return max(0, self.num_runs - self.num_calls)

    def note_rebuilt(self, num_saved: int) -> None:
        """To be called with how many saved tensors of a call became recipes."""
        self.num_rebuilt += num_saved

    def counting(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward, each run of it counted."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num_runs += 1
            return forward(*args, **kwargs)

        return counted
