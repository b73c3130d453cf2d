"""The outer search: where state and parameters are, with fused kernels or without, in lower precision if need be.

For each of them `planning.search_at_location` finds the cheapest candidate whose forecast fits.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import msgspec

from memwall.errors import InfeasibleError, UsageError
from memwall.machine.hardware import Hardware
from memwall.planning.action import Action
from memwall.planning.candidate import Candidate, plan_of
from memwall.planning.device_phases import with_device_phases
from memwall.planning.explain import infeasible_message, relaxations
from memwall.planning.location import IN_MEMORY, Location
from memwall.planning.planfile import Plan
from memwall.planning.relaxations import plan_relaxations
from memwall.planning.search_at_location import SearchAtLocation
from memwall.planning.search_inputs import SearchInputs
from memwall.planning.settings import Settings
from memwall.planning.technique import Technique, techniques
from memwall.predict.curve import step_seconds
from memwall.predict.device import DeviceModel
from memwall.trace.records import Trace
from memwall.units import format_bytes, parse_size

__all__ = ["make_plan", "plan"]

# Writes wear a disk, and its time is less certain than arithmetic: forecasts of steps with state on disk a fifth
# off (benchmarks/optimizer_state.py). Where memory suffices, state stays unless the whole step is so much shorter.
_CLEARLY_SHORTER = 1.3
# A lossy technique is chosen only if the step gets 5 % shorter, or nothing else fits.
_WORTH_DIGITS = 1.05
# Shares of the room that a candidate's tensors leave, which are tried for state.
_ROOM_SHARES = (1.0, 0.7, 0.4)


def plan(
    trace: Trace,
    *,
    budget: str | int,
    disk: str | None = None,
    tier_capacity_bytes: int | None = None,
    disk_writes: str | int | None = None,
    allow: Sequence[str] = (),
    global_batch: int | None = None,
    hardware: Hardware | None = None,
    under_autocast: Callable[[], Trace] | None = None,
    with_kernels: Callable[[str | None], tuple[Trace, Action | None]] | None = None,
) -> Plan:
    """Returns the cheapest plan under which the traced run fits `budget`.

    Where none leaves room for the forecast's error, one that fits without it: its `forecast.fits` is False.

    Args:
        budget: what the process may use on the trace's device: bytes or a size such as "10GiB".
        disk: directory of the next tier; by default the one measured when the trace was recorded.
        tier_capacity_bytes: the most to take of that tier; by default all that is free.
        disk_writes: the most to write to it in a day of training, in bytes or as a size such as "2TiB": writes wear a
            disk. By default there is no limit.
        allow: what may be done that is not bit-exact: words of --allow, which `memwall plan --help` explains.
        global_batch: samples per optimizer step; must be what the trace ran. Given, the plan may split it into smaller
            micro-batches that accumulate; without it the micro-batch stays.
        hardware: the device that the trace was translated to (memwall.predict.cuda.translate), where it is not here.
        under_autocast: records the same step in the device's lower precision, for when nothing else fits.
        with_kernels: records the same step with fused kernels, for when a plan without them costs time.

    Raises:
        InfeasibleError: nothing fits; says how much would, and what to allow.
        UsageError: the budget is no size, the global batch is not the trace's, or something is allowed that
            cannot be done.
    """
    for technique in techniques():
        reason = technique.why_not(trace, tuple(allow)) if technique.allow in allow else None
        if reason is not None:
            raise UsageError(f"--allow {technique.allow}: {reason}")
    recorded = trace.micro_batch * trace.num_micro_batches
    if global_batch is not None and global_batch != recorded:
        raise UsageError(
            f"the trace ran {recorded} samples per optimizer step, asked for is a global batch of {global_batch}; "
            "record a trace with that batch"
        )
    if disk is not None and trace.device == "cpu" and trace.machine.disk != disk:
        raise UsageError(
            f"disk={disk!r}: the trace knows the speed of {trace.machine.disk or 'no disk'}; measure this one with "
            "`memwall plan TRACE --disk DIR`"
        )
    settings = Settings(
        budget_bytes=parse_size(budget),
        disk=disk,
        tier_capacity_bytes=tier_capacity_bytes,
        disk_bytes_per_day=None if disk_writes is None else parse_size(disk_writes),
        allow=tuple(allow),
        allow_accumulation=global_batch is not None,
        hardware=hardware,
        under_autocast=under_autocast,
        with_kernels=with_kernels,
    )
    return make_plan(trace, settings)


def make_plan(trace: Trace, settings: Settings) -> Plan:
    """Returns the cheapest plan; see `plan`.

    Raises:
        InfeasibleError: nothing fits.
    """
    search = _Search(trace, settings)
    for has_margin in (True, False):
        found = _best_of(search, has_margin=has_margin)
        if found is not None:
            return found
        for technique in techniques():
            recording = technique.recording_where_nothing_fits(trace, settings)
            if recording is not None:
                return make_plan(recording.trace, recording.settings)
    raise min((search, *search.others), key=_Search.smallest_bytes).infeasible()


def _best_of(plain: "_Search", *, has_margin: bool) -> Plan | None:
    """Returns the plan of the shortest step; another recording is looked at only where the plans of this cost time."""
    plain.has_margin = has_margin
    found = plain.best()
    if found is not None and not any((action.cost_seconds or 0.0) > 0.0 for action in found.actions):
        return plain.as_plan(found)
    best = plain
    for search in plain.others:
        search.has_margin = has_margin
        other = search.best()
        if other is not None and (found is None or search.seconds_of(other) < best.seconds_of(found)):
            found, best = other, search
    return None if found is None else best.as_plan(found)


class _Search:
    """Looks for the cheapest candidate for one recording of a step.

    Args:
        plain: the search for the recording that this one is compared with, if there is one.
    """

    def __init__(self, trace: Trace, settings: Settings, plain: "_Search | None" = None) -> None:
        self.trace, self.settings, self._plain = trace, settings, plain
        self._inputs = inputs = SearchInputs(trace, settings)
        self.steady, self._process = inputs.steady, inputs.process
        self.has_margin = True
        """Whether a plan must leave room for the forecast's error."""
        self._barred: list[Location] = []
        """Locations that would write more to the disk in a day than is allowed, the leanest one last."""
        self._smallest_bytes: int | None = None
        ordinary = self._ordinary_locations()
        self._ordinary = self._within_writes(() if isinstance(ordinary, str) else ordinary)
        """Ways to have state on the next tier, the one that frees most first."""
        self._lossy: list[tuple[Technique[Any], Location]] = []
        """Ways that lose digits, each with the technique that offers it."""
        self._leanest = IN_MEMORY
        self._last_resorts: tuple[Location, ...] = ()
        """Parts that are added to the leanest ordinary way where nothing else fits, ever more of them."""
        self._stays: list[str] = []
        """Why there is no last resort."""
        for technique in techniques():
            offered = technique.locations(inputs, ordinary)
            if technique.choice == "worth-digits" and isinstance(offered, tuple):
                self._lossy += [(technique, location) for location in offered]
            if technique.choice == "last-resort":
                if isinstance(offered, str):
                    self._stays += [offered] if offered else []
                elif isinstance(ordinary, tuple) and ordinary:
                    added = tuple(location.plus(ordinary[0]) for location in offered)
                    kept = self._within_writes(added)
                    self._last_resorts += tuple(o for o, both in zip(offered, added, strict=True) if both in kept)
                    self._leanest = ordinary[0]
        self._can_pack = any(
            technique.block_levers
            and technique.allow in settings.allow
            and not technique.why_not(trace, settings.allow)
            for technique in techniques()
        )

    def _ordinary_locations(self) -> tuple[Location, ...] | str:
        """Returns the locations that lose nothing, the one that frees most first; or why there are none."""
        found: tuple[Location, ...] = ()
        reason = ""
        for technique in techniques():
            offered = technique.locations(self._inputs, ()) if technique.choice == "clearly-shorter" else ()
            if isinstance(offered, str):
                reason = reason or offered
            else:
                found += offered
        return found or reason

    @cached_property
    def others(self) -> "tuple[_Search, ...]":
        """Returns searches for other recordings of the same step that the user allowed, as with fused kernels."""
        if self._plain is not None:
            return ()
        found = (technique.recording_where_it_costs(self.trace, self.settings) for technique in techniques())
        return tuple(_Search(one.trace, one.settings, plain=self) for one in found if one is not None)

    def best(self) -> Candidate | None:
        """Returns the cheapest candidate that fits; one that loses digits only where that is worth it."""
        exact = self._best(packs=False)
        if exact is not None and not exact.actions:
            return exact
        packed = self._best(packs=True) if self._can_pack else None
        located = (self._best_at(location, packs=self._can_pack) for _, location in self._lossy)
        lossy = min((one for one in (packed, *located) if one is not None), key=self.seconds_of, default=None)
        if exact is None or lossy is None:
            return exact or lossy
        is_worth_it = self.seconds_of(exact) >= _WORTH_DIGITS * self.seconds_of(lossy)
        return lossy if is_worth_it else exact

    def _best(self, *, packs: bool) -> Candidate | None:
        best = in_memory = self._best_at(IN_MEMORY, packs=packs)
        for location in self._ordinary:
            at_most = math.inf if best is None else best.extra_seconds
            if in_memory is not None:
                plain_seconds = step_seconds(self.steady)
                at_most = min(at_most, (plain_seconds + in_memory.extra_seconds) / _CLEARLY_SHORTER - plain_seconds)
            if location.seconds < at_most:
                found = self._best_at(location, packs=packs)
                if found is not None and found.extra_seconds < at_most:
                    best = found
        if best is not None:
            return self._filled(best, packs=packs)
        chosen: Location | None = None
        for part in self._last_resorts:
            location = part.plus(self._leanest)
            if best is None or location.seconds < best.extra_seconds:
                found = self._best_at(location, packs=packs)
                if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                    best, chosen = found, part
        if best is None or chosen is None:
            return best
        for location in self._ordinary[1:]:
            best = self._shorter(best, chosen.plus(location), packs=packs)
        return self._filled(best, packs=packs)

    def _filled(self, found: Candidate, *, packs: bool) -> Candidate:
        """Returns the candidate with more state in memory, as far as its tensors leave room, where that is shorter."""
        if not self.has_margin or not found.location.actions:  # the margin is no room
            return found
        # Free pages that the heap keeps are room, too; what tensors need beside each other's gaps is not known.
        tensors_bytes = min(
            found.process_bytes, self._process.base_bytes + self._process.workspace_bytes + found.live_bytes
        )
        room_bytes = self._limit_bytes - tensors_bytes
        for share in _ROOM_SHARES:
            for technique in techniques():
                fuller = technique.fuller(self._inputs, found.location, int(share * room_bytes))
                filled = found if fuller is None else self._shorter(found, fuller, packs=packs)
                if filled is not found:
                    return filled
        return found

    def _shorter(self, found: Candidate, location: Location, *, packs: bool) -> Candidate:
        """Returns the candidate, or that of another location if its step is shorter."""
        # Of page faults a plan can save no more than there are.
        at_least = location.seconds - self._inputs.plain_fault_seconds
        other = self._best_at(location, packs=packs) if at_least < found.extra_seconds else None
        return other if other is not None and other.extra_seconds < found.extra_seconds else found

    def _within_writes(self, locations: tuple[Location, ...]) -> tuple[Location, ...]:
        """Returns those that the limit on a day's writes allows."""
        allowed = tuple(one for one in locations if self._inputs.writable_bytes(one) >= 0)
        self._barred.extend(one for one in locations if one not in allowed)
        return allowed

    def _best_at(self, location: Location, *, packs: bool) -> Candidate | None:
        if self._inputs.writable_bytes(location) < 0:
            return None
        return SearchAtLocation(self._inputs, location, packs=packs).best(self._limit_bytes)

    @property
    def _limit_bytes(self) -> int:
        return self._inputs.limit_bytes(has_margin=self.has_margin)

    def seconds_of(self, found: Candidate) -> float:
        """Returns the seconds of a step under a candidate."""
        return step_seconds(self.steady) + found.extra_seconds

    def as_plan(self, found: Candidate) -> Plan:
        """Returns the plan file's record of a candidate, and what would leave room for the margin if it has none."""
        made = plan_of(
            found,
            self.trace,
            self.steady,
            self.steady if self._plain is None else self._plain.steady,
            self._process,
            budget_bytes=self.settings.budget_bytes,
            fits=self.has_margin,
            smallest_budget_bytes=self.smallest_bytes(),
        )
        if isinstance(self._process, DeviceModel):
            made = with_device_phases(made, self.trace, self._process)
        for technique, location in self._lossy:
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
            last = [part.plus(self._leanest) for part in self._last_resorts[-1:]]
            lossy = [location for _, location in self._lossy]
            leanest = (next(iter(self._ordinary), IN_MEMORY), *lossy, *last)
            smallest_bytes = min(
                SearchAtLocation(self._inputs, location, packs=self._can_pack).smallest_bytes() for location in leanest
            )
            first = self.settings.first_step
            if first is not None:
                smallest_bytes = first.least_budget_bytes(
                    smallest_bytes, asked_bytes=self.settings.budget_bytes, budget_for=self._process.budget_for
                )
            self._smallest_bytes = smallest_bytes
        return self._smallest_bytes

    def infeasible(self) -> InfeasibleError:
        """Says by how much, and what would help."""
        helps, smallest = self._relaxations(), self.smallest_bytes()
        return InfeasibleError(
            infeasible_message(
                self.trace,
                self.settings.budget_bytes,
                smallest,
                helps,
                parameters_stay=next(iter(self._stays), ""),
                is_running=self.settings.first_step is not None,
            ),
            budget_bytes=self.settings.budget_bytes,
            smallest_feasible_bytes=smallest,
            relaxations=helps,
            not_modelled=self._process.not_modelled(),
        )

    def _relaxations(self) -> tuple[str, ...]:
        if self.settings.hardware is None:
            helps = relaxations(self.trace, self.settings.allow, can_split=self.settings.allow_accumulation)
            if self._barred:
                per_day = max(self._inputs.written_bytes_per_day(one) for one in self._barred)
                enough = format_bytes(per_day, rounding="up")
                helps = (f"let {enough} be written to the disk in a day: --disk-writes SIZE", *helps)
            return helps
        return plan_relaxations(
            self.trace,
            self.settings,
            smallest_bytes=self.smallest_bytes(),
            smallest_bytes_of=lambda trace, settings: _Search(trace, settings).smallest_bytes(),
        )
