"""Where state and parameters are between their uses, as the search compares it: actions, bytes and seconds."""

from msgspec import Struct

from memwall.planning.action import Action
from memwall.trace.optimizers import JOINT, STEPPED_ALONE, counted
from memwall.trace.records import Trace
from memwall.units import format_bytes

MOST_PLACED = 8
"""Optimizers whose state can leave memory, at most: each takes a file, or pinned memory, and buffers of its own."""


class Location(Struct, frozen=True, kw_only=True):
    """Holds actions that say where bytes are which stand between steps; without actions all of them are in memory."""

    actions: tuple[Action, ...] = ()
    """Actions in the order in which they are applied."""
    away_bytes: int = 0
    """Bytes whose place is on the next tier."""
    staging_bytes: int = 0
    """Bytes of that tier through which others pass."""
    lowest_bytes: int = 0
    """Bytes whose place is on the disk below that tier; they pass both."""
    written_bytes: int = 0
    """Bytes that a step writes to the tier."""
    read_bytes: int = 0
    """Bytes that a step reads back."""
    grown_bytes: int = 0
    """Bytes that the process grows by beside the step, as by libraries that it would not load otherwise; negative where
    it holds less."""
    built_bytes: int = 0
    """Process bytes before parameters leave memory; 0 where they stay."""
    paged_bytes: int = 0
    """Bytes that pass through memory outside the tensor heap."""
    keeps_tier_busy: bool = False
    """Whether bytes pass all through forward and backward: then saved tensors stay and the batch stays whole."""

    keeps_batch_whole: bool = False
    """Whether the batch cannot be divided besides."""

    @property
    def seconds(self) -> float:
        """Returns the seconds that a step takes longer."""
        return sum(action.cost_seconds or 0.0 for action in self.actions)

    @property
    def held_bytes(self) -> int:
        """Returns the bytes that the next tier holds."""
        return self.away_bytes + self.staging_bytes

    def plus(self, other: "Location") -> "Location":
        """Returns both together; this one's actions come first."""
        return Location(
            actions=self.actions + other.actions,
            away_bytes=self.away_bytes + other.away_bytes,
            staging_bytes=self.staging_bytes + other.staging_bytes,
            lowest_bytes=self.lowest_bytes + other.lowest_bytes,
            written_bytes=self.written_bytes + other.written_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            grown_bytes=self.grown_bytes + other.grown_bytes,
            built_bytes=max(self.built_bytes, other.built_bytes),
            paged_bytes=self.paged_bytes + other.paged_bytes,
            keeps_tier_busy=self.keeps_tier_busy or other.keeps_tier_busy,
            keeps_batch_whole=self.keeps_batch_whole or other.keeps_batch_whole,
        )


IN_MEMORY = Location()


def can_offload(trace: Trace) -> str | None:
    """Returns None if bytes can leave the device for the next tier, else why not."""
    if trace.machine.next_tier is not None:
        return None
    if trace.device == "cpu":
        return "there is no disk to move saved tensors to; pass --disk DIR"
    return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"


def can_move_optimizer_state(trace: Trace, state_bytes: int, capacity_bytes: int) -> str | None:
    """Returns None if the optimizer's state can be on the next tier between steps, else why not.

    Args:
        state_bytes: bytes of state that are in tensors large enough to move.
        capacity_bytes: bytes that the tier may be used for.
    """
    if trace.device not in ("cpu", "cuda"):
        return f"optimizer state moves from CPU and CUDA memory only; the trace is of device '{trace.device}'"
    if trace.machine.next_tier is None:
        if trace.device == "cuda":
            return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"
        return "there is no disk to move optimizer state to; pass --disk DIR"
    names = trace.optimizer.split(JOINT)
    if len(names) > MOST_PLACED:
        several = f"{len(names)} optimizers step the model ({counted(trace.optimizer)})"
        return f"{several}, and state moves of {MOST_PLACED} at most"
    unknown = next((name for name in names if name not in STEPPED_ALONE), None)
    if unknown is not None:
        return f"{unknown or 'the optimizer'} is not known to step each parameter alone"
    if state_bytes == 0:
        return f"{trace.optimizer} has no state that is large enough to move"
    if state_bytes > capacity_bytes:
        tier = "disk" if trace.device == "cpu" else "host memory"
        return f"the state needs {format_bytes(state_bytes)} of {tier}, there are {format_bytes(capacity_bytes)}"
    return None
