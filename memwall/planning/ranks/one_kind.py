"""The best plan of one rank under one kind of sharding: the search of one process, in the step of a rank."""

from functools import cached_property

from msgspec.structs import replace

from memwall.planning.blocks import find_blocks
from memwall.planning.candidate import Candidate
from memwall.planning.one_recording.recording_search import RecordingSearch
from memwall.planning.planfile import Plan
from memwall.planning.ranks.forecast import AnySharding
from memwall.planning.settings import Settings
from memwall.predict.call_rules import Treatment
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.device import DeviceModel
from memwall.predict.sharding.kind import RankCost
from memwall.predict.sharding.network import Network
from memwall.predict.sharding.units import TraceUnits
from memwall.predict.treatment import StepModel
from memwall.trace.records import Step, Trace
from memwall.units import format_bytes, format_seconds

# Budgets that are tried in search of one that holds, each so much larger.
_MOST_ROUNDS, _NEXT_BUDGET = 12, 1.02


class OneKind:
    """Answers about one kind of sharding.

    Args:
        units: of a translated step of one process with the batch of one rank.
        settings: with the device; the tier's capacity is that of one rank.
    """

    def __init__(self, kind: AnySharding, units: TraceUnits, settings: Settings, network: Network) -> None:
        self.kind, self._units, self._network, self._asked = kind, units, network, settings
        self._plain, self._settings = units.trace, _with_communicators(settings, kind, network)
        self.found: Candidate | None = None
        self.fits = False
        self.is_searched = False
        """Whether its plans have been looked at."""
        self._settled_bytes = 0

    def among(self, network: Network) -> "OneKind":
        """Returns the same kind among other ranks."""
        return OneKind(self.kind, self._units, self._asked, network)

    def of(self, kind: AnySharding) -> "OneKind":
        """Returns another kind among the same ranks."""
        return OneKind(kind, self._units, self._asked, self._network)

    @cached_property
    def cost(self) -> RankCost:
        """Returns the steady step of a rank, and what it costs besides."""
        return self._cost(self._units.steady)

    @cached_property
    def why_not(self) -> str:
        """Returns why it is no choice, before anything is planned; "" if it is one."""
        reason = self.kind.why_not(self._network)
        if reason is not None:
            return reason
        if self.kind.allow and self.kind.allow not in self._settings.allow:
            return f"changes numerics: {self.kind.changes_numerics(self._plain)}; --allow {self.kind.allow}"
        host_bytes = self._settings.tier_capacity_bytes
        if self.kind.needs_host and not host_bytes:
            return "it needs host memory: --host SIZE"
        if self.kind.needs_host and self.cost.host_bytes > (host_bytes or 0):
            return f"it needs {format_bytes(self.cost.host_bytes)} of host memory for each rank"
        return ""

    @property
    def changes_numerics(self) -> str:
        """Returns what makes it train other numbers than is allowed; "" where nothing does."""
        return "" if self.kind.allow else self.kind.changes_numerics(self._plain)

    @property
    def least_seconds(self) -> float:
        """Returns the seconds that no plan of this kind can save."""
        return step_seconds(self.cost.step) + self.cost.exposed_seconds

    def seconds(self) -> float:
        """Returns the seconds of a step under the plan that was found."""
        assert self.found is not None
        further = (self.found.num_parts - 1) * self.cost.exposed_per_pass
        return self._search.seconds_of(self.found) + self.cost.exposed_seconds + further

    @cached_property
    def plain_bytes(self) -> int:
        """Returns the process bytes of a rank's step as it is, the allocator simulated."""
        return self.process.untreated(self.cost.step).process_bytes

    @cached_property
    def process(self) -> DeviceModel:
        """Returns what forecasts a rank's process."""
        assert self._settings.hardware is not None
        return DeviceModel(self.trace, self._settings.hardware)

    @property
    def fits_plain(self) -> bool:
        """Tells whether a rank fits with nothing treated, the margin included."""
        return self.fits_in_budget(self.plain_bytes)

    def fits_in_budget(self, process_bytes: int) -> bool:
        """Tells whether a forecast keeps to the budget with room for its error, as the search asks of a plan."""
        budget_bytes = self._settings.budget_bytes
        return process_bytes <= budget_bytes - self.process.margin_bytes(budget_bytes)

    def search(self, *, has_margin: bool = True) -> None:
        """Looks for the cheapest plan that fits, with room for the forecast's error or without it."""
        self.is_searched = True
        self._search.has_margin = has_margin
        self._search.is_outline = bool(self.changes_numerics)  # it is shown, and never chosen
        self.found = self._search.best()
        self.fits = has_margin and self.found is not None

    @property
    def needed_bytes(self) -> int:
        """Returns the least budget that is told where the one given is too small, margin included."""
        return max(self._search.smallest_bytes(), self._settings.budget_bytes + 1, self._settled_bytes)

    def settle(self) -> bool:
        """Raises what is told until there is a plan for it, and tells whether that was still to be done.

        What is told first follows from the leanest step; the search weighs other steps, with other pieces cached.
        """
        if self._settled_bytes:
            return False
        needed_bytes = self.needed_bytes
        for _ in range(_MOST_ROUNDS):
            settings = replace(self._search.settings, budget_bytes=needed_bytes)
            if RecordingSearch(self.trace, settings, process=self.process).best():
                break
            needed_bytes = int(needed_bytes * _NEXT_BUDGET)
        self._settled_bytes = needed_bytes
        return True

    def plan(self) -> Plan:
        """Returns the plan that was found, its seconds with what is exposed of communication."""
        assert self.found is not None
        made = self._search.as_plan(self.found)
        forecast = made.forecast
        added = self.seconds() - self._search.seconds_of(self.found)
        lower = forecast.lower_bound_seconds
        forecast = replace(
            forecast,
            step_seconds=self.seconds(),
            lower_bound_seconds=None if lower is None else lower + self.cost.exposed_seconds,
            plain_step_seconds=(forecast.plain_step_seconds or 0.0) + added,
            binding=(*forecast.binding, *self._price_of_reducing_each()),
        )
        return replace(made, forecast=forecast)

    def _price_of_reducing_each(self) -> tuple[str, ...]:
        """Returns what it saves and costs that each micro-batch's gradients are reduced; nothing where it is one."""
        assert self.found is not None
        num_more = self.found.num_parts - 1
        if not num_more or not self.cost.waiting_gradient_bytes:
            return ()
        return (
            "each micro-batch's gradients are reduced (Accelerate's sync_each_batch): if they waited for the last one, "
            f"a rank would hold {format_bytes(self.cost.waiting_gradient_bytes)} more, and reduce for "
            f"{format_seconds(num_more * self.cost.reduction_seconds)} less",
        )

    def recomputed(self) -> tuple[Step, float]:
        """Returns the step with every block recomputed, and the seconds that this adds."""
        step = self.cost.step
        model = StepModel(step, self._plain.names, find_blocks(self._plain, step))
        treated = model.treated({block.path: Treatment(recompute=True) for block in model.blocks})
        return treated, step_seconds(treated) - step_seconds(step)

    def outlined_bytes(self, step: Step, reserved_share: float) -> int:
        """Returns the process bytes of a step by its live bytes, where so much is reserved for each of them."""
        return self.process.base_bytes + int(live_peak_bytes(step, self.trace.device) * reserved_share)

    def standing_bytes(self, reserved_share: float) -> int:
        """Returns the same of what is live all through the step, which no treatment takes away."""
        step, device = self.cost.step, self.trace.device
        here = (each for each in step.storages if each.device_type == device)
        standing_bytes = sum(each.nbytes for each in here if each.birth < 0 and each.death >= len(step.ops))
        return self.process.base_bytes + int(standing_bytes * reserved_share)

    @cached_property
    def trace(self) -> Trace:
        """Returns the trace of one rank."""
        steady = self._units.steady
        steps = tuple(self.cost.step if step is steady else self._cost(step).step for step in self._plain.steps)
        return replace(self._plain, steps=steps)

    @cached_property
    def _search(self) -> RecordingSearch:
        capacity = self._settings.tier_capacity_bytes
        return RecordingSearch(
            self.trace,
            replace(
                self._settings,
                can_move_state=self.kind.moves_state,
                tier_capacity_bytes=None if capacity is None else max(1, capacity - self.cost.host_bytes),
            ),
            process=self.process,
        )

    def _cost(self, step: Step) -> RankCost:
        return self.kind.cost(self._plain, step, self._units.of(step), self._network)


def _with_communicators(settings: Settings, kind: AnySharding, network: Network) -> Settings:
    """Returns the settings with what communicators hold on each rank counted into its context."""
    hardware = settings.hardware
    assert hardware is not None
    num = 0 if network.num_ranks == 1 else kind.num_communicators
    low, high = (
        context + num * communicator
        for context, communicator in zip(hardware.context_bytes, hardware.communicator_bytes, strict=True)
    )
    return replace(settings, hardware=replace(hardware, context_bytes=(low, high)))
