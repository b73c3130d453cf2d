"""The outer search: where state and parameters are, with fused kernels or without, in lower precision if need be.

For each of them `planning.located_search` finds the cheapest candidate whose forecast fits.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import msgspec

from memwall.errors import InfeasibleError, UsageError
from memwall.machine.hardware import Hardware
from memwall.planning.actions import FusedKernels
from memwall.planning.block_actions import MIN_MOVED_BYTES, WINDOW_BYTES
from memwall.planning.candidate import Candidate, plan_of
from memwall.planning.device_phases import with_device_phases
from memwall.planning.explain import infeasible_message, relaxations, slower_on_cpu
from memwall.planning.fused import kernels_compared
from memwall.planning.legality import can_autocast, can_pack, can_step_on_cpu, can_use_kernels
from memwall.planning.located_search import PlacedSearch
from memwall.planning.locations import IN_MEMORY, Place, parameters_away, state_away, stepped_on_cpu
from memwall.planning.low_bit import low_bit_state, why_no_low_bits
from memwall.planning.placement import with_more_resident
from memwall.planning.planfile import Plan
from memwall.planning.relaxations import plan_relaxations
from memwall.planning.search_inputs import Problem
from memwall.planning.settings import Settings
from memwall.predict.curve import step_seconds
from memwall.predict.device import DeviceModel
from memwall.trace.build import steady_step
from memwall.trace.records import Trace
from memwall.units import format_bytes, parse_size

__all__ = ["MIN_MOVED_BYTES", "WINDOW_BYTES", "Settings", "make_plan", "plan", "steady_step"]

# Writes wear a disk, and its time is less certain than arithmetic: forecasts of steps with state on disk a fifth
# off (benchmarks/optimizer_state.py). Where memory suffices, state stays unless the whole step is so much shorter.
_CLEARLY_SHORTER = 1.3
# What loses digits is taken where the whole step is so much shorter, or nothing else fits.
_WORTH_DIGITS = 1.05
# Of the room that a candidate's tensors leave, what is tried for state.
_ROOM_SHARES = (1.0, 0.7, 0.4)
_KERNELS_READ_THEM = "fused kernels read them outside their modules' own calls"


def plan(
    trace: Trace,
    *,
    budget: str | int,
    disk: str | None = None,
    disk_capacity_bytes: int | None = None,
    disk_writes: str | int | None = None,
    allow: Sequence[str] = (),
    global_batch: int | None = None,
    hardware: Hardware | None = None,
    under_autocast: Callable[[], Trace] | None = None,
    with_kernels: Callable[[str | None], tuple[Trace, FusedKernels | None]] | None = None,
) -> Plan:
    """The cheapest plan under which the traced run fits `budget`.

    Where none leaves room for the forecast's error, one that fits without it: its `forecast.fits` is False.

    Args:
        budget: what the process may use on the trace's device: bytes or a size such as "10GiB".
        disk: directory of the next tier; by default the one measured when the trace was recorded.
        disk_capacity_bytes: the most to take of it; by default all that is free.
        disk_writes: the most to write to it in a day of training, in bytes or as a size such as "2TiB": writes wear a
            disk. By default there is no limit.
        allow: relaxations: "kernels" round at other points; "precision", "low-bit-offload",
            "low-bit-optimizer" and "cpu-optimizer-step" change numerics. The last needs a trace for a CUDA device
            with the speed of the CPU: a session's, or that of `memwall plan SPEC --device NAME --host SIZE`.
        global_batch: samples per optimizer step; must be what the trace ran. Given, the plan may split it into smaller
            micro-batches that accumulate; without it the micro-batch stays.
        hardware: the device that the trace was translated to (memwall.predict.cuda.translate), where it is not here.
        under_autocast: records the same step in the device's lower precision, for when nothing else fits.
        with_kernels: records the same step with fused kernels, for when a plan without them costs time.

    Raises:
        InfeasibleError: nothing fits; says how much would, and what to allow.
        UsageError: the budget is no size, the global batch is not the trace's, or a step on the CPU is allowed and
            cannot be.
    """
    reason = can_step_on_cpu(trace, tuple(allow)) if "cpu-optimizer-step" in allow else None
    if reason is not None:
        raise UsageError(f"cpu-optimizer-step: {reason}")
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
        disk_capacity_bytes=disk_capacity_bytes,
        disk_bytes_per_day=None if disk_writes is None else parse_size(disk_writes),
        allow=tuple(allow),
        allow_accumulation=global_batch is not None,
        hardware=hardware,
        under_autocast=under_autocast,
        with_kernels=with_kernels,
    )
    return make_plan(trace, settings)


def make_plan(trace: Trace, settings: Settings) -> Plan:
    """See `plan`.

    Raises:
        InfeasibleError: nothing fits.
    """
    search = _Search(trace, settings)
    for has_margin in (True, False):
        found = _best_of(search, has_margin=has_margin)
        if found is not None:
            return found
        if settings.under_autocast is not None and can_autocast(trace, settings.allow) is None:
            lower = settings.under_autocast()
            dtype = None if lower.autocast == "none" else lower.autocast
            return make_plan(lower, msgspec.structs.replace(settings, autocast=dtype, under_autocast=None))
    searches = [search] if search.fused is None else [search, search.fused]
    raise min(searches, key=_Search.smallest_bytes).infeasible()


def _best_of(plain: "_Search", *, has_margin: bool) -> Plan | None:
    """The plan of the shortest step. One with fused kernels is looked for only where the others cost time."""
    plain.has_margin = has_margin
    found = plain.best()
    if found is not None and not any((action.cost_seconds or 0.0) > 0.0 for action in found.actions):
        return plain.as_plan(found)
    fused = plain.fused
    if fused is not None:
        fused.has_margin = has_margin
        other = fused.best()
        if other is not None and (found is None or fused.seconds_of(other) < plain.seconds_of(found)):
            return fused.as_plan(other)
    return None if found is None else plain.as_plan(found)


class _Search:
    def __init__(self, trace: Trace, settings: Settings) -> None:
        self.trace, self.settings = trace, settings
        self._problem = problem = Problem(trace, settings)
        self.steady, self._process = problem.steady, problem.process
        self.unfused: _Search | None = None
        """Where this one is for a step with fused kernels, the one without."""
        self.has_margin = True
        """Whether a plan must leave room for the forecast's error."""
        self._places: tuple[Place, ...] = ()
        """Ways to have the optimizer's state on the next tier, the one that frees most first."""
        self._barred: list[Place] = []
        """Ways that would write more to the disk in a day than is allowed, the leanest one last."""
        legal: tuple[Place, ...] = ()
        if settings.can_move_state:
            legal = state_away(trace, self.steady, capacity_bytes=problem.capacity_bytes)
            self._places = self._within_writes(legal)
        self._last_resorts: tuple[Place, ...] = ()
        """The leanest of these with gradients on disk as well, and ever more parameters."""
        self._parameters_stay = settings.parameters_stay or ("" if settings.kernels is None else _KERNELS_READ_THEM)
        """Why there is no such way; "" where there is, or where nothing is on disk anyway."""
        if problem.has_disk and not self._parameters_stay:
            found = parameters_away(trace, self.steady, legal, capacity_bytes=problem.capacity_bytes)
            if isinstance(found, str):
                self._parameters_stay = found
            else:
                self._last_resorts = self._within_writes(found)
        self._low_bit: tuple[Place, ...] = ()
        """State in memory, in 8 bits; () where that is not legal."""
        if settings.can_move_state and why_no_low_bits(trace, settings.allow) is None:
            self._low_bit = (Place(low_bit=low_bit_state(trace, self.steady)),)
        self._on_cpu: tuple[Place, ...] = ()
        """State in host memory and the step beside it; () where that is not legal."""
        if settings.can_move_state:
            self._on_cpu = stepped_on_cpu(
                trace, self.steady, capacity_bytes=problem.capacity_bytes, allow=settings.allow
            )
        self._can_pack = can_pack(trace, settings.allow) is None
        self._smallest_bytes: int | None = None

    @cached_property
    def fused(self) -> "_Search | None":
        """The search for the same step with fused kernels, where they are allowed and change anything."""
        settings = self.settings
        if settings.with_kernels is None:
            return None
        if can_use_kernels(self.trace.device, settings.allow, is_here=settings.hardware is None) is not None:
            return None
        trace, found = settings.with_kernels(settings.autocast)
        if found is None:
            return None
        kernels = kernels_compared(found, self.trace, trace)
        lower, with_kernels = settings.under_autocast, settings.with_kernels
        fused = _Search(
            trace,
            msgspec.structs.replace(
                settings,
                kernels=kernels,
                with_kernels=None,
                under_autocast=None if lower is None else lambda: with_kernels(lower().autocast)[0],
            ),
        )
        fused.unfused = self
        return fused

    def best(self) -> Candidate | None:
        """The cheapest candidate that fits; one that loses digits only where that is worth it."""
        exact = self._best(packs=False)
        if exact is not None and not exact.actions:
            return exact
        packed = self._best(packs=True) if self._can_pack else None
        placed = (self._best_at(place, packs=self._can_pack) for place in (*self._low_bit, *self._on_cpu))
        lossy = min((one for one in (packed, *placed) if one is not None), key=self.seconds_of, default=None)
        if exact is None or lossy is None:
            return exact or lossy
        is_worth_it = self.seconds_of(exact) >= _WORTH_DIGITS * self.seconds_of(lossy)
        return lossy if is_worth_it else exact

    def _best(self, *, packs: bool) -> Candidate | None:
        best = in_memory = self._best_at(IN_MEMORY, packs=packs)
        for place in self._places:
            at_most = math.inf if best is None else best.extra_seconds
            if in_memory is not None:
                plain_seconds = step_seconds(self.steady)
                at_most = min(at_most, (plain_seconds + in_memory.extra_seconds) / _CLEARLY_SHORTER - plain_seconds)
            if place.seconds < at_most:
                found = self._best_at(place, packs=packs)
                if found is not None and found.extra_seconds < at_most:
                    best = found
        if best is not None:
            return self._filled(best, packs=packs)
        for place in self._last_resorts:
            if best is None or place.seconds < best.extra_seconds:
                found = self._best_at(place, packs=packs)
                if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                    best = found
        if best is None:
            return None
        for place in self._places[1:]:
            best = self._shorter(best, place._replace(parameters=best.place.parameters), packs=packs)
        return self._filled(best, packs=packs)

    def _filled(self, found: Candidate, *, packs: bool) -> Candidate:
        """With more state in memory, as much as the candidate's tensors leave room for, where that is shorter."""
        place = found.place
        if place.state is None or not self.has_margin:  # what the margin would be is no room
            return found
        # Free pages that the heap keeps are room, too; what tensors need beside each other's gaps is not known.
        tensors_bytes = min(
            found.process_bytes, self._process.base_bytes + self._process.workspace_bytes + found.live_bytes
        )
        room_bytes = self._limit_bytes - tensors_bytes
        for share in _ROOM_SHARES:
            state = with_more_resident(self.trace, self.steady, place.state, int(share * room_bytes))
            if state is not None:
                filled = self._shorter(found, place._replace(state=state), packs=packs)
                if filled is not found:
                    return filled
        return found

    def _shorter(self, found: Candidate, place: Place, *, packs: bool) -> Candidate:
        """The candidate, or that of another place if its step is shorter."""
        # Of page faults a plan can save no more than there are.
        at_least = place.seconds - self._problem.plain_fault_seconds
        other = self._best_at(place, packs=packs) if at_least < found.extra_seconds else None
        return other if other is not None and other.extra_seconds < found.extra_seconds else found

    def _within_writes(self, places: tuple[Place, ...]) -> tuple[Place, ...]:
        """Those that the limit on a day's writes allows."""
        allowed = tuple(place for place in places if self._problem.writable_bytes(place) >= 0)
        self._barred.extend(place for place in places if place not in allowed)
        return allowed

    def _best_at(self, place: Place, *, packs: bool) -> Candidate | None:
        if self._problem.writable_bytes(place) < 0:
            return None
        return PlacedSearch(self._problem, place, packs=packs).best(self._limit_bytes)

    @property
    def _limit_bytes(self) -> int:
        return self._problem.limit_bytes(has_margin=self.has_margin)

    def seconds_of(self, found: Candidate) -> float:
        """Of a step under a candidate."""
        return step_seconds(self.steady) + found.extra_seconds

    def as_plan(self, found: Candidate) -> Plan:
        """The plan file's record of a candidate, with what would leave room for the margin where it has none."""
        made = plan_of(
            found,
            self.trace,
            self.steady,
            self.steady if self.unfused is None else self.unfused.steady,
            self._process,
            budget_bytes=self.settings.budget_bytes,
            fits=self.has_margin,
            smallest_budget_bytes=self.smallest_bytes(),
        )
        if isinstance(self._process, DeviceModel):
            made = with_device_phases(made, self.trace, self._process)
        for place in self._on_cpu:
            assert place.state is not None
            reasons = slower_on_cpu(self.trace, made.actions, place.state)
            forecast = msgspec.structs.replace(made.forecast, binding=(*made.forecast.binding, *reasons))
            made = msgspec.structs.replace(made, forecast=forecast)
        if self.has_margin or self.settings.hardware is None:
            return made
        forecast = msgspec.structs.replace(made.forecast, relaxations=self._relaxations())
        return msgspec.structs.replace(made, forecast=forecast)

    def smallest_bytes(self) -> int:
        """The smallest budget for which a plan exists, margin included, with every tier that is there.

        Of a run that has begun, one that its first step keeps to as well.
        """
        if self._smallest_bytes is None:
            leanest = (next(iter(self._places), IN_MEMORY), *self._low_bit, *self._on_cpu, *self._last_resorts[-1:])
            smallest_bytes = min(
                PlacedSearch(self._problem, place, packs=self._can_pack).smallest_bytes() for place in leanest
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
                parameters_stay=self._parameters_stay,
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
                per_day = max(self._problem.written_bytes_per_day(place) for place in self._barred)
                enough = format_bytes(per_day, rounding="up")
                helps = (f"let {enough} be written to the disk in a day: --disk-writes SIZE", *helps)
            return helps
        return plan_relaxations(
            self.trace,
            self.settings,
            smallest_bytes=self.smallest_bytes(),
            smallest_bytes_of=lambda trace, settings: _Search(trace, settings).smallest_bytes(),
        )
