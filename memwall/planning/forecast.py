"""The forecast of a run: peaks by phase, seconds, and what is not modelled. The JSON contract's object."""

from typing import Literal

from msgspec import Struct

from memwall.planning.action import Action
from memwall.planning.ranks.forecast import RanksForecast
from memwall.predict.cuda_allocator.advice import AllocatorAdvice
from memwall.predict.link_time import LinkTime
from memwall.trace.records import Route
from memwall.trace.workload_facts import WorkloadFacts


class PeakBytes(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the peaks of one phase, by where they are measured."""

    allocated_bytes: int
    """Bytes in tensors."""
    reserved_bytes: int | None = None
    """Bytes the caching allocator holds; null on a CPU."""
    process_bytes: int
    """Bytes that the meter shows for the process: the card's, or resident memory on a CPU."""
    host_bytes: int | None = None
    disk_bytes: int | None = None


class Lever(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes a way to need less memory, used or not: simulated, and without the time spent waiting for a link."""

    name: str
    freed_bytes: int
    """Between forward and backward, if every block that can be treated so is; of the others, at the peak."""
    cost_seconds: float
    """Seconds that this adds to a step."""
    num_blocks: int = 0
    """Blocks that can be treated so; 0 for what treats no single block, which a plan then uses."""
    num_blocks_used: int = 0
    """Blocks that the plan treats so."""

    @property
    def seconds_per_gib(self) -> float:
        """Returns the seconds that a GiB costs this way."""
        return self.cost_seconds / self.freed_bytes * (1 << 30)


class BudgetPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds what the cheapest plan for one budget comes to."""

    budget_bytes: int
    process_bytes: int
    """The most that the process holds under that plan."""
    step_seconds: float | None
    num_actions: dict[str, int]
    """Actions of the plan, by their kind."""


class Forecast(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds the prediction for one plan."""

    schema: Literal["memwall.forecast/1"] = "memwall.forecast/1"
    tag: Literal["simulated"] = "simulated"
    """Holds for every figure but the phases that were measured already."""
    device: str
    source: Literal["fake", "recorded", "snapshot"]
    route: Route | None = None
    """How the step was recorded for a device that is not here, as `--route` says; None on this one."""
    fits: bool | None
    budget_bytes: int | None
    margin_bytes: int
    peak: PeakBytes
    phases: dict[str, PeakBytes]
    measured_phases: tuple[str, ...] = ()
    """Phases that a run has shown: the first step, which is recorded under the safest plan."""
    peak_phase: str | None = None
    """The first phase in which the process reaches its peak; None where nothing is known of phases."""
    step_seconds: float | None
    not_modelled: tuple[str, ...]
    actions: tuple[Action, ...] = ()
    levers: tuple[Lever, ...] = ()
    """Ways to need less memory that were weighed, the cheapest first; none where nothing had to be treated."""
    binding: tuple[str, ...] = ()
    smallest_feasible_budget_bytes: int | None = None
    relaxations: tuple[str, ...] = ()
    plain_peak: PeakBytes | None = None
    """The same run without any action."""
    plain_step_seconds: float | None = None
    moved_bytes_per_step: int = 0
    """Bytes written to the next tier in one optimizer step; the same number comes back."""
    lower_bound_seconds: float | None = None
    """No plan of these options can make the step shorter than this."""
    link: LinkTime | None = None
    """Bytes that a step moves to the next tier and back, and their seconds; None where it moves nothing."""
    workload: WorkloadFacts | None = None
    """The training step that all of this is for; None in files written before it was kept."""
    allocator: AllocatorAdvice | None = None
    """Advice on the CUDA allocator for the same run without any action; None where it is not simulated."""
    ranks: RanksForecast | None = None
    """How the model is divided among ranks, where that was asked; all the rest is for one of them."""
    curve: tuple[BudgetPoint, ...] = ()
    """Plans for other budgets, from the smallest to one under which nothing needs to be done, where that was asked."""

    @property
    def passed_phases(self) -> tuple[str, ...]:
        """Returns the measured phases that held more than the budget."""
        if self.budget_bytes is None:
            return ()
        return tuple(name for name in self.measured_phases if self.phases[name].process_bytes > self.budget_bytes)

    @property
    def steady_process_bytes(self) -> int:
        """Returns the bytes that the process needs in a steady step; its peak where the forecast has no such phase."""
        return self.phases.get("steady_step", self.peak).process_bytes
