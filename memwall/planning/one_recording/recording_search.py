"""The search for one recording of a step: where state and parameters are, and which digits may be lost.

For each location `search_at_location` finds the cheapest candidate whose forecast fits.
"""

import copy
import math
from functools import cached_property

import msgspec

from memwall.errors import InfeasibleError
from memwall.planning.candidate import Candidate, plan_of
from memwall.planning.device_phases import with_device_phases
from memwall.planning.explain import infeasible_message, relaxations
from memwall.planning.location import IN_MEMORY, Location
from memwall.planning.one_recording.offered_locations import OfferedLocations
from memwall.planning.one_recording.relaxations import plan_relaxations
from memwall.planning.one_recording.search_at_location import SearchAtLocation
from memwall.planning.one_recording.search_inputs import SearchInputs
from memwall.planning.planfile import Plan
from memwall.planning.settings import Settings
from memwall.planning.technique import techniques
from memwall.predict.curve import step_seconds
from memwall.predict.device import DeviceModel
from memwall.predict.first_step import FirstStep
from memwall.predict.process import Process
from memwall.trace.records import Trace

# Writes wear a disk, and its time is less certain than arithmetic: forecasts of steps with state on disk a fifth
# off (benchmarks/optimizer_state.py). Where memory suffices, state stays unless the whole step is so much shorter.
_CLEARLY_SHORTER = 1.3
# A lossy technique is chosen only if the step gets 5 % shorter, or nothing else fits.
_WORTH_DIGITS = 1.05
# So much shorter a step has to get where a loop may do less under a plan that loses nothing.
_WORTH_FREEDOM = 1.05
# Budgets that are tried where what would do at least is less than what was asked for, each so much larger.
_MOST_LARGER, _NEXT_BUDGET = 16, 1.02
# Of a margin that no plan leaves whole, the part that a plan may take for a shorter step.
_SHARE_FOR_SPEED = 0.25


class RecordingSearch:
    """Looks for the cheapest candidate for one recording of a step.

    Args:
        plain: the search for the recording that this one is compared with, if there is one.
        process: replays steps of the trace, where one does that already.
    """

    def __init__(
        self,
        trace: Trace,
        settings: Settings,
        plain: "RecordingSearch | None" = None,
        process: Process | None = None,
    ) -> None:
        self.trace, self.settings, self._plain = trace, settings, plain
        self._inputs = inputs = SearchInputs(trace, settings, process)
        self.steady, self._process = inputs.steady, inputs.process
        self.has_margin = True
        """Whether a plan must leave room for the forecast's error."""
        self.fills = False
        """Whether an allocator may be so full that it gives back what it keeps in every step."""
        self.is_outline = False
        """Whether plans near the cheapest will do."""
        self._limit_bytes = 0
        """Process bytes that the candidates looked for may use."""
        self._smallest_bytes: int | None = None
        self._offers = OfferedLocations(inputs)
        self._can_pack = any(
            technique.block_levers
            and technique.allow in settings.allow
            and not technique.why_not(trace, settings.allow)
            for technique in techniques()
        )

    def under(self, settings: Settings) -> "RecordingSearch":
        """Returns the search under another budget, or where more was needed so far; what neither changes is kept."""
        found = copy.copy(self)
        found.settings, found._inputs, found._smallest_bytes = settings, self._inputs.under(settings), None
        found._offers = OfferedLocations(found._inputs)
        found.has_margin, found.fills, found.is_outline = True, False, False
        vars(found).pop("others", None)
        return found

    @property
    def can_fill(self) -> bool:
        """Tells whether a full allocator has a forecast of its own: else `fills` changes nothing."""
        return self._process.gives_back

    @cached_property
    def others(self) -> "tuple[RecordingSearch, ...]":
        """Returns searches for other recordings of the same step that the user allowed, as with fused kernels."""
        if self._plain is not None:
            return ()
        found = (technique.recording_where_it_costs(self.trace, self.settings) for technique in techniques())
        return tuple(RecordingSearch(one.trace, one.settings, plain=self) for one in found if one is not None)

    def best(self) -> Candidate | None:
        """Returns the cheapest candidate that fits; one that loses digits only where that is worth it.

        Where the margin does not fit, one that leaves nearly as much of it as any does.
        """
        budget_bytes = self.settings.budget_bytes
        if not self.has_margin:
            least_bytes = self._least_plan_bytes - self._process.margin_bytes(self._least_plan_bytes)
            near_bytes = least_bytes + int(_SHARE_FOR_SPEED * self._process.margin_bytes(budget_bytes))
            found = self._best_within(near_bytes) if near_bytes < budget_bytes else None
            if found is not None:
                return found
        return self._best_within(self._inputs.limit_bytes(has_margin=self.has_margin))

    def _best_within(self, limit_bytes: int) -> Candidate | None:
        self._limit_bytes = limit_bytes
        exact = self._best(packs=False)
        if exact is not None and not exact.actions:
            return exact
        packed = self._best(packs=True) if self._can_pack else None
        located = (self._best_at(location, packs=self._can_pack) for _, location in self._offers.lossy)
        lossy = min((one for one in (packed, *located) if one is not None), key=self.seconds_of, default=None)
        if exact is None or lossy is None:
            return exact or lossy
        is_worth_it = self.seconds_of(exact) >= _WORTH_DIGITS * self.seconds_of(lossy)
        return lossy if is_worth_it else exact

    def _best(self, *, packs: bool) -> Candidate | None:
        best = self._best_at(IN_MEMORY, packs=packs)
        for location in self._offers.in_memory[1:]:
            best = self._best_at(location, packs=packs) if best is None else self._shorter(best, location, packs=packs)
        for location in self._offers.bound:
            at_most = math.inf if best is None else self._shorter_by(_WORTH_FREEDOM, best)
            if location.seconds < at_most:
                found = self._best_at(location, packs=packs)
                best = found if found is not None and found.extra_seconds < at_most else best
        in_memory = best
        for location in self._offers.ordinary:
            at_most = math.inf if best is None else best.extra_seconds
            if in_memory is not None:
                at_most = min(at_most, self._shorter_by(_CLEARLY_SHORTER, in_memory))
            if location.seconds < at_most:
                found = self._best_at(location, packs=packs)
                if found is not None and found.extra_seconds < at_most:
                    best = found
        if best is not None:
            return best
        chosen: Location | None = None
        for part in self._offers.last_resorts:
            location = part.plus(self._offers.leanest)
            if best is None or location.seconds < best.extra_seconds:
                found = self._best_at(location, packs=packs)
                if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                    best, chosen = found, part
        if best is None or chosen is None:
            return best
        for location in self._offers.ordinary[1:]:
            best = self._shorter(best, chosen.plus(location), packs=packs)
        return best

    def _shorter_by(self, factor: float, found: Candidate) -> float:
        """Returns the seconds that may be added to a step that is to be shorter than a candidate's by a factor."""
        return self.seconds_of(found) / factor - step_seconds(self.steady)

    def _shorter(self, found: Candidate, location: Location, *, packs: bool) -> Candidate:
        """Returns the candidate, or that of another location if its step is shorter."""
        # Of page faults a plan can save no more than there are.
        at_least = location.seconds - self._inputs.plain_fault_seconds
        other = self._best_at(location, packs=packs) if at_least < found.extra_seconds else None
        return other if other is not None and other.extra_seconds < found.extra_seconds else found

    def _best_at(self, location: Location, *, packs: bool) -> Candidate | None:
        if not self._inputs.allows(location):
            return None
        search = SearchAtLocation(self._inputs, location, packs=packs, fills=self.fills, is_outline=self.is_outline)
        return search.best(self._limit_bytes)

    def seconds_of(self, found: Candidate) -> float:
        """Returns the seconds of a step under a candidate."""
        return step_seconds(self.steady) + found.extra_seconds

    def as_plan(self, found: Candidate) -> Plan:
        """Returns the plan file's record of a candidate, and what would leave room for the margin if it has none."""
        smallest_bytes, budget_bytes, first = (
            self.smallest_bytes(),
            self.settings.budget_bytes,
            self.settings.first_step,
        )
        if self.has_margin and (first is None or max(first.needed_bytes, first.before_bytes) <= budget_bytes):
            smallest_bytes = min(smallest_bytes, budget_bytes)  # this run is the proof
        made = plan_of(
            found,
            self.trace,
            self.steady,
            self.steady if self._plain is None else self._plain.steady,
            self._process,
            budget_bytes=budget_bytes,
            fits=self.has_margin,
            smallest_budget_bytes=smallest_bytes,
        )
        if isinstance(self._process, DeviceModel):
            made = with_device_phases(made, self.trace, self._process)
        for technique, location in self._offers.lossy:
            reasons = tuple(technique.against(self.trace, made.actions, location))
            forecast = msgspec.structs.replace(made.forecast, binding=(*made.forecast.binding, *reasons))
            made = msgspec.structs.replace(made, forecast=forecast)
        if self.has_margin or self.settings.hardware is None:
            return made
        forecast = msgspec.structs.replace(made.forecast, relaxations=self._relaxations())
        return msgspec.structs.replace(made, forecast=forecast)

    def smallest_bytes(self) -> int:
        """Returns the smallest budget for which a plan exists, margin included, with every tier that is there.

        Of a run that has begun, one that its first step keeps to as well.
        """
        if self._smallest_bytes is None:
            self._smallest_bytes = self._kept_to_from(max(self._least_plan_bytes, self._copying_bytes))
        return self._smallest_bytes

    def _kept_to_from(self, smallest_bytes: int) -> int:
        """Returns the smallest budget that a whole run keeps to, of one that has room for what is foreseen."""
        first = self.settings.first_step
        if first is None:
            return smallest_bytes
        if not self.can_fill:
            # The next run's step is recorded anew: what is foreseen from it may differ by a margin.
            smallest_bytes = self._process.budget_for(smallest_bytes)
        smallest_bytes = first.least_budget_bytes(
            smallest_bytes,
            asked_bytes=self.settings.budget_bytes,
            budget_for=self._process.budget_for,
        )
        if first.others_bytes and self._process.budget_for(smallest_bytes) >= first.built_from_bytes:
            smallest_bytes = max(smallest_bytes, self._smallest_with_others(first))
        return smallest_bytes

    def _smallest_with_others(self, first: FirstStep) -> int:
        """Returns the smallest budget where other models' parameters are built in memory, and no plan moves them."""
        settings = msgspec.structs.replace(self.settings, first_step=first.with_others())
        return RecordingSearch(self.trace, settings, plain=self._plain, process=self._process).smallest_bytes()

    @cached_property
    def _least_plan_bytes(self) -> int:
        searches = (SearchAtLocation(self._inputs, where, packs=self._can_pack) for where in self._leanest_locations)
        return min(search.smallest_bytes() for search in searches)

    @cached_property
    def _copying_bytes(self) -> int:
        """Returns the smallest budget with room for copies of the weights between steps, as far as those count."""
        held = (SearchAtLocation(self._inputs, where).copying_bytes for where in self._leanest_locations)
        return self._process.budget_for(min(held))

    @property
    def _leanest_locations(self) -> tuple[Location, ...]:
        last = [part.plus(self._offers.leanest) for part in self._offers.last_resorts[-1:]]
        lossy = [location for _, location in self._offers.lossy]
        lowest = [location for location in self._offers.ordinary if location.lowest_bytes][:1]
        return (
            next(iter(self._offers.ordinary), self._offers.in_memory[-1]),
            *lowest,
            *self._offers.bound,
            *lossy,
            *last,
        )

    def infeasible(self) -> InfeasibleError:
        """Says by how much, and what would help."""
        helps, smallest, first = self._relaxations(), self.smallest_bytes(), self.settings.first_step
        without_copies = self._kept_to_from(self._least_plan_bytes)
        if smallest <= self.settings.budget_bytes:
            smallest = self._smallest_found() or smallest
        before_bytes = 0 if first is None else first.before_bytes
        if smallest != self._process.budget_for(before_bytes):
            before_bytes = 0
        evaluated = [SearchAtLocation(self._inputs, location).evaluation_bytes for location in self._leanest_locations]
        return InfeasibleError(
            infeasible_message(
                self.trace,
                self.settings.budget_bytes,
                smallest,
                helps,
                parameters_stay=self._offers.stays,
                is_running=first is not None,
                evaluation_batch=0 if first is None else max(first.evaluation_batch, first.called_batch),
                evaluation_bytes=min(evaluated),
                kept_bytes=0 if first is None else first.kept_bytes,
                kept_at="" if first is None else first.kept_at,
                without_copies_bytes=without_copies if without_copies < smallest else 0,
                first_step_bytes=self._binding_first_step_bytes,
                before_bytes=before_bytes,
                plain_bytes=None
                if first is None or first.evaluation_batch or before_bytes or self.trace.device != "cpu"
                else self._process.free(self.steady).process_bytes,
            ),
            budget_bytes=self.settings.budget_bytes,
            smallest_feasible_bytes=smallest,
            relaxations=helps,
            not_modelled=self._process.not_modelled(),
        )

    def _smallest_found(self) -> int:
        """Returns the first larger budget that a plan is found for; 0 if none is.

        What is told otherwise is what a device's allocator can do with at least, and a plan may not get there.
        """
        budget_bytes = self.settings.budget_bytes
        for _ in range(_MOST_LARGER):
            budget_bytes = int(budget_bytes * _NEXT_BUDGET)
            settings = msgspec.structs.replace(self.settings, budget_bytes=budget_bytes)
            search = self.under(settings)
            search.fills = search.can_fill
            if search.best() is not None:
                return max(budget_bytes, search.smallest_bytes())
        return 0

    @property
    def _binding_first_step_bytes(self) -> int:
        """Returns what a device's recorded step held, where no smaller budget can be told for that; else 0."""
        first = self.settings.first_step
        if first is None or self.trace.device == "cpu" or self.smallest_bytes() <= self._least_plan_bytes:
            return 0
        return first.needed_bytes

    def _relaxations(self) -> tuple[str, ...]:
        if self.settings.hardware is None:
            helps = relaxations(self.trace, self.settings.allow, can_split=self.settings.allow_accumulation)
            return ("let the disk be written to: leave out --no-disk", *helps) if self._offers.are_barred else helps
        return plan_relaxations(
            self.trace,
            self.settings,
            smallest_bytes=self.smallest_bytes(),
            smallest_bytes_of=lambda trace, settings: RecordingSearch(trace, settings).smallest_bytes(),
        )
