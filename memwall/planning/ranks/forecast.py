"""Holds what is said of many ranks: every kind of sharding with its bytes and seconds, and a curve over ranks."""

from msgspec import Struct

from memwall.predict.sharding.ddp import Ddp
from memwall.predict.sharding.fsdp2 import Fsdp2
from memwall.predict.sharding.network import Network
from memwall.predict.sharding.zero import DeepSpeedZero

AnySharding = Ddp | Fsdp2 | DeepSpeedZero


class RankChoice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes one rank's step under one kind of sharding, with the plan that is best beside it."""

    sharding: AnySharding
    words: str
    """The name that people give the kind."""
    by: str
    """The library that carries it out."""
    fits: bool
    process_bytes: int = 0
    """Forecast for one rank: under its plan; without one, what fits the budget that the reason tells; 0 where it is no
    choice."""
    margin_bytes: int = 0
    host_bytes: int = 0
    """Bytes in host memory for one rank."""
    step_seconds: float | None = None
    """At the peak rates of device and links; None where it does not fit."""
    communication_seconds: float = 0.0
    """All collectives of a step, one after the other."""
    exposed_seconds: float = 0.0
    """Seconds of the step for communication, and copies and steps on the CPU, that no computation hides."""
    samples_per_second: float | None = None
    """Counts all ranks together."""
    tokens_per_second: float | None = None
    """Counts all ranks together; None where inputs are no tokens."""
    micro_batch: int = 0
    num_micro_batches: int = 1
    actions: tuple[str, ...] = ()
    """Says what memwall does beside it, each with the number of blocks."""
    reason: str = ""
    """Why it was not chosen; "" for the choice."""


class CurvePoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes the best kind for a number of ranks, the batch of each rank being the same: in outline, by live bytes.

    Blocks are all recomputed or none, and nothing is offloaded by memwall.
    """

    num_ranks: int
    words: str
    """The name that people give the kind; "" where none fits."""
    process_bytes: int
    """Forecast for one rank; where none fits, the least of all kinds."""
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    is_recomputed: bool = False


class RankBytes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Says what a rank holds at the peak of its step under the plan, were there so many ranks."""

    num_ranks: int
    standing_bytes: int
    """Parameters, gradients, optimizer state and buffers, as far as they are a rank's own between collectives."""
    gathered_bytes: int
    """Parameters that collectives have made whole."""
    in_flight_bytes: int
    """Tensors that are reduced or sent."""
    activation_bytes: int
    """All other tensors."""
    outside_bytes: int
    """The device's context, communicators, and what the allocator has beyond tensors."""

    @property
    def tensor_bytes(self) -> int:
        """Returns the bytes of all tensors."""
        return self.standing_bytes + self.gathered_bytes + self.in_flight_bytes + self.activation_bytes


class RanksForecast(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the choice of how to divide a model among ranks."""

    network: Network
    link: str | None
    """The link between nodes, by its name; None for one node."""
    chosen: AnySharding | None
    """None where nothing fits."""
    units: tuple[str, ...]
    """Modules that are divided, gathered and reduced each by itself, the root left out, in order of forward."""
    block_classes: tuple[str, ...] = ()
    """Names of the classes of blocks among them."""
    choices: tuple[RankChoice, ...]
    curve: tuple[CurvePoint, ...]
    peak: tuple[RankBytes, ...] = ()
    """A rank's bytes under the choice: for these ranks, and for eight more where there is a network of them."""
