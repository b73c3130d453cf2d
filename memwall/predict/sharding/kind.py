"""A kind of sharding as the planner knows it: the step of one rank under it, and the seconds of its communication."""

from typing import ClassVar

from msgspec import Struct

from memwall.predict.sharding.network import Network
from memwall.predict.sharding.units import ShardUnit
from memwall.trace.records import Step, Trace


class RankCost(Struct, frozen=True, kw_only=True):
    """Holds the step of one rank, and what it costs besides its operations."""

    step: Step
    communication_seconds: float
    """All collectives of a step, one after the other, at the peak rate of the links."""
    exposed_seconds: float
    """Seconds of them that no computation hides, and copies and steps on the CPU that nothing hides."""
    exposed_per_pass: float = 0.0
    """The part of that which is spent again for each further micro-batch."""
    waiting_gradient_bytes: int = 0
    """Bytes that gradients would hold more if all micro-batches but the last left them whole."""
    reduction_seconds: float = 0.0
    """Collectives that each of these would do without."""
    host_bytes: int = 0
    """Bytes that the kind keeps in host memory for the rank."""


class Sharding(Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True):
    """Decides how a model's parameters, gradients and optimizer state are divided among ranks."""

    by: ClassVar[str]
    """The library that carries it out: torch or DeepSpeed."""
    moves_state: ClassVar[bool] = False
    """Whether memwall may move optimizer state beside it."""

    @property
    def allow(self) -> str:
        """Returns the word of --allow without which it is never chosen; "" where it needs none."""
        return ""

    @property
    def allow_means(self) -> str:
        """Says what that word allows, for people."""
        return ""

    @property
    def num_communicators(self) -> int:
        """Returns the groups of ranks that collectives run in."""
        return 1

    @property
    def words(self) -> str:
        """Returns what people call it."""
        raise NotImplementedError

    @property
    def needs_host(self) -> bool:
        """Tells whether it keeps bytes in host memory."""
        return False

    def changes_numerics(self, trace: Trace) -> str:
        """Returns what makes it train other numbers than the recorded step; "" where nothing does."""
        return ""

    def why_not(self, network: Network) -> str | None:
        """Returns why it is no choice for these ranks; None if it is one."""
        return None

    def cost(self, trace: Trace, step: Step, units: tuple[ShardUnit, ...], network: Network) -> RankCost:
        """Returns the step of one rank, and the seconds of its collectives."""
        raise NotImplementedError
