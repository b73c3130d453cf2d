"""Where state and parameters are between their uses, as the search compares it: actions, bytes and seconds."""

from msgspec import Struct

from memwall.planning.action import Action
from memwall.trace.records import Trace

__all__ = ["IN_MEMORY", "Location", "can_offload"]


class Location(Struct, frozen=True, kw_only=True):
    """Holds actions that say where bytes are which stand between steps; without actions all of them are in memory."""

    actions: tuple[Action, ...] = ()
    """Actions in the order in which they are applied."""
    away_bytes: int = 0
    """Bytes whose place is on the next tier."""
    staging_bytes: int = 0
    """Bytes of that tier through which others pass."""
    written_bytes: int = 0
    """Bytes that a step writes to the tier."""
    read_bytes: int = 0
    """Bytes that a step reads back."""
    library_bytes: int = 0
    """Bytes that the process grows by for libraries that it would not load otherwise."""
    built_bytes: int = 0
    """Process bytes before parameters leave memory; 0 where they stay."""
    paged_bytes: int = 0
    """Bytes that pass through memory outside the tensor heap."""
    keeps_tier_busy: bool = False
    """Whether bytes pass all through forward and backward: then saved tensors stay and the batch stays whole."""

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
            written_bytes=self.written_bytes + other.written_bytes,
            read_bytes=self.read_bytes + other.read_bytes,
            library_bytes=self.library_bytes + other.library_bytes,
            built_bytes=max(self.built_bytes, other.built_bytes),
            paged_bytes=self.paged_bytes + other.paged_bytes,
            keeps_tier_busy=self.keeps_tier_busy or other.keeps_tier_busy,
        )


IN_MEMORY = Location()


def can_offload(trace: Trace) -> str | None:
    """Returns None if bytes can leave the device for the next tier, else why not."""
    if trace.machine.next_tier is not None:
        return None
    if trace.device == "cpu":
        return "there is no disk to move saved tensors to; pass --disk DIR"
    return "nothing is known of the link to host memory; pass --host SIZE together with --device NAME"
