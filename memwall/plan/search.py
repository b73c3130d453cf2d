"""The outer search: what to split, what to treat, how memory is reused; the cheapest plan whose forecast fits.

Per candidate: solve for live bytes, replay the treated step through the allocator, take what fragmentation adds off the
budget and solve again. The replayed peak decides; the solver only proposes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import msgspec

from memwall.errors import InfeasibleError, PlanError, UsageError
from memwall.plan.actions import Accumulate, Action, AllocatorReuse, Autocast, FusedKernels
from memwall.plan.blocks import find_blocks
from memwall.plan.candidate import Candidate, plan_of
from memwall.plan.device_phases import with_device_phases
from memwall.plan.explain import binding_reasons, infeasible_message, relaxations
from memwall.plan.fused import kernels_compared
from memwall.plan.instance import Choice, Instance, Link
from memwall.plan.legality import can_accumulate, can_autocast, can_offload, can_reuse_allocator, can_use_kernels
from memwall.plan.live_budgets import LiveBudgets, Shares, Tightening
from memwall.plan.menu import Costs, Menu, build_instance, build_menus
from memwall.plan.microbatch import candidate_micro_batches, with_micro_batch
from memwall.plan.orders import MIN_MOVED_BYTES, WINDOW_BYTES, block_actions, treatments_of_choice, window_bytes_of
from memwall.plan.parameters import built_bytes, streamed_bytes
from memwall.plan.places import IN_MEMORY, Place, parameters_away, place_step, state_away
from memwall.plan.planfile import Plan
from memwall.plan.relaxations import plan_relaxations
from memwall.plan.settings import Settings
from memwall.plan.solve import smallest_feasible_bytes, solve
from memwall.predict.curve import live_peak_bytes, step_seconds
from memwall.predict.device import DeviceModel
from memwall.predict.hardware import Hardware
from memwall.predict.process import Process, ProcessModel, Resident
from memwall.predict.timing import first_touch_seconds, smoothed
from memwall.predict.treatment import StepModel, Treatment
from memwall.trace.build import steady_step
from memwall.trace.records import Step, Trace
from memwall.units import parse_size

__all__ = ["MIN_MOVED_BYTES", "WINDOW_BYTES", "Settings", "make_plan", "plan", "steady_step"]

# What each operation of a further micro-batch costs besides its arithmetic: dispatch and launch.
_SECONDS_PER_OP = 8e-6
# Writes wear a disk, and its time is less certain than arithmetic: forecasts of steps with state on disk were a quarter
# off (benchmarks/optimizer_state.py). Where memory suffices, state stays unless the whole step is so much shorter.
_CLEARLY_SHORTER = 1.3
_KERNELS_READ_THEM = "fused kernels read them outside their modules' own calls"


def plan(
    trace: Trace,
    *,
    budget: str | int,
    disk: str | None = None,
    disk_capacity_bytes: int | None = None,
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
        allow: relaxations: "kernels" round at other points, "precision" changes numerics.
        global_batch: samples per optimizer step; must be what the trace ran. Given, the plan may split it into smaller
            micro-batches that accumulate; without it the micro-batch stays.
        hardware: the device that the trace was translated to (memwall.predict.translate), where it is not here.
        under_autocast: records the same step in the device's lower precision, for when nothing else fits.
        with_kernels: records the same step with fused kernels, for when a plan without them costs time.

    Raises:
        InfeasibleError: nothing fits; says how much would, and what to allow.
        UsageError: the budget is no size, or the global batch is not the trace's.
    """
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
        self.unfused: _Search | None = None
        """Where this one is for a step with fused kernels, the one without."""
        self.has_margin = True
        """Whether a plan must leave room for the forecast's error."""
        self.process: Process
        self.live_budgets: type[LiveBudgets]
        if settings.hardware is None:
            self.process, self.live_budgets = ProcessModel(trace), Shares
        else:
            self.process, self.live_budgets = DeviceModel(trace, settings.hardware), Tightening
        self.steady = steady_step(trace)
        blocks = find_blocks(trace, self.steady)
        self.steady = smoothed(self.steady, blocks)
        self.plain = self.process.untreated(self.steady)
        self.plain_fault_seconds = min(
            self.plain.fault_seconds, first_touch_seconds(self.steady, trace.machine.fault_seconds_per_byte)
        )
        """Of the recorded times, what another way of reusing memory can save."""
        self.places: tuple[Place, ...] = ()
        """Ways to have the optimizer's state on disk, the one that frees most first."""
        if settings.can_move_state:
            self.places = state_away(trace, self.steady, capacity_bytes=self._capacity_bytes)
        self.last_resort: Place | None = None
        """Parameters on disk as well."""
        self.parameters_stay = settings.parameters_stay or ("" if settings.kernels is None else _KERNELS_READ_THEM)
        """Why there is no such way; "" where there is, or where nothing is on disk anyway."""
        if self._has_disk and not self.parameters_stay:
            found = parameters_away(trace, self.steady, self.places, capacity_bytes=self._capacity_bytes)
            if isinstance(found, Place):
                self.last_resort = found
            else:
                self.parameters_stay = found
        self.place = IN_MEMORY
        """Where state and parameters are, in the candidates that are tried now."""
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

    # -- candidates ------------------------------------------------------------------------------------------------

    def best(self) -> Candidate | None:
        """The cheapest candidate that fits; the user's own micro-batch first, so that equal costs leave it alone."""
        best = in_memory = self._best_at(IN_MEMORY)
        for place in self.places:
            at_most = math.inf if best is None else best.extra_seconds
            if in_memory is not None:
                plain_seconds = step_seconds(self.steady)
                at_most = min(at_most, (plain_seconds + in_memory.extra_seconds) / _CLEARLY_SHORTER - plain_seconds)
            if place.seconds < at_most:
                found = self._best_at(place)
                if found is not None and found.extra_seconds < at_most:
                    best = found
        return best if best is not None or self.last_resort is None else self._best_at(self.last_resort)

    def _best_at(self, place: Place) -> Candidate | None:
        self.place = place
        best: Candidate | None = None
        if self._built_bytes > self._limit_bytes():
            return None
        for model, num_parts in self._models():
            found = self._best_for(model, num_parts, math.inf if best is None else best.extra_seconds)
            if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                best = found
            if best is not None and not best.actions:
                break
        return best

    def _models(self) -> Iterator[tuple[StepModel, int]]:
        """The step of each micro-batch there is, and how many of them the recorded one is split into."""
        steady = place_step(self.trace, self.steady, self.place)
        whole = self.trace.micro_batch
        can_split = can_accumulate(self.trace, is_cooperative=self.settings.allow_accumulation) is None
        # Parameters on disk are read again for each part, which no cost here knows.
        can_split &= self.place.parameters is None
        for micro_batch in candidate_micro_batches(self.trace) if can_split else (whole,):
            step = with_micro_batch(self.trace, steady, micro_batch)
            blocks = find_blocks(self.trace, step)
            yield StepModel(step, self.trace.names, blocks), whole // micro_batch if micro_batch else 1

    def _tiers(self) -> tuple[bool, ...]:
        """Whether to move saved tensors: without, and where there is a tier to move them to, with.

        A disk that parameters pass through again and again has no time for them.
        """
        is_free = can_offload(self.trace) is None and self.place.parameters is None
        return (False, True) if is_free else (False,)

    def _best_for(self, model: StepModel, num_parts: int, at_most: float) -> Candidate | None:
        """The cheapest candidate for a micro-batch, unless it is known to cost `at_most` seconds or more."""
        plain = self.process.untreated(model.step)
        # What passes through memory beside malloc is in no forecast of it: then the heap is held to a limit.
        if self.place.parameters is None and self.process.fits_untouched(
            plain.process_bytes, budget_bytes=self.settings.budget_bytes, limit_bytes=self._limit_bytes()
        ):
            return self._found(model, num_parts, {}, plain, None, 0)
        best: Candidate | None = None
        for with_disk in self._tiers():
            found = self._solve_for(model, num_parts, with_disk, at_most)
            if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                best, at_most = found, min(at_most, found.extra_seconds)
        return best

    def _fixed_actions(self, num_parts: int) -> list[Action]:
        actions: list[Action] = list(self.place.actions)
        if self.settings.autocast is not None:
            actions.append(Autocast(dtype=self.settings.autocast))
        if self.settings.kernels is not None:
            actions.append(self.settings.kernels)
        if num_parts > 1:
            micro_batch = self.trace.micro_batch // num_parts
            actions.append(
                Accumulate(micro_batch=micro_batch, num_micro_batches=num_parts * self.trace.num_micro_batches)
            )
        return actions

    def _solve_for(self, model: StepModel, num_parts: int, with_disk: bool, at_most: float) -> Candidate | None:
        """Solves for several live budgets: more live bytes cost less recomputation, but more page faults.

        Ends as soon as nothing that is left can cost less than `at_most`: replays are what takes long.
        """
        menus, instance = self._instance(model, num_parts, with_disk)
        limit_bytes = self._limit_bytes()
        room_bytes = limit_bytes - self.process.base_bytes - self.process.workspace_bytes
        best: Candidate | None = None
        tried: set[tuple[int, ...]] = set()
        # What a choice costs besides its own seconds; of page faults it can save no more than there are.
        least_seconds = self._split_seconds(model, num_parts) + self.place.seconds - self.plain_fault_seconds
        budgets = self.live_budgets(room_bytes, lambda: smallest_feasible_bytes(instance))
        for live_bytes in budgets:
            choice = solve(msgspec.structs.replace(instance, budget_bytes=live_bytes))
            if choice is None or (best is not None and choice.extra_seconds >= best.extra_seconds):
                break  # fewer live bytes are harder still, and cost more
            if choice.extra_seconds + least_seconds >= at_most:
                break
            if choice.options in tried:
                continue
            tried.add(choice.options)
            treatments, window_bytes = treatments_of_choice(menus, choice), window_bytes_of(menus, choice)
            step = model.treated(treatments)
            resident = self._resident(step, limit_bytes - window_bytes)
            if resident.process_bytes + window_bytes > limit_bytes:
                budgets.over(resident.process_bytes + window_bytes - self.process.base_bytes)
                continue
            found = self._found(model, num_parts, treatments, resident, (menus, choice), window_bytes)
            if best is None or found.extra_seconds < best.extra_seconds:
                best = found
        return best

    @property
    def _has_disk(self) -> bool:
        return self.trace.device == "cpu" and can_offload(self.trace) is None

    @property
    def _capacity_bytes(self) -> int:
        return self.settings.disk_capacity_bytes or self.trace.machine.disk_free_bytes

    @staticmethod
    def _split_seconds(model: StepModel, num_parts: int) -> float:
        return (num_parts - 1) * len(model.step.ops) * _SECONDS_PER_OP

    def _resident(self, step: Step, limit_bytes: int) -> Resident:
        if can_reuse_allocator(self.trace) is not None:
            return self.process.bare(step)
        resident = self.process.treated(step, limit_bytes)
        parameters = self.place.parameters
        if parameters is None:
            return resident
        # What passes through lies outside the heap.
        paged_bytes = streamed_bytes(self.trace, self.steady, parameters)
        return msgspec.structs.replace(resident, outside_bytes=resident.outside_bytes + paged_bytes)

    @property
    def _built_bytes(self) -> int:
        """What the process holds before parameters leave it; 0 where they stay."""
        parameters = self.place.parameters
        return 0 if parameters is None else built_bytes(self.trace, parameters)

    def _limit_bytes(self) -> int:
        """Process bytes up to which a plan may go: the budget without the margin."""
        budget_bytes = self.settings.budget_bytes
        return budget_bytes - (self.process.margin_bytes(budget_bytes) if self.has_margin else 0)

    def _instance(self, model: StepModel, num_parts: int, with_disk: bool) -> tuple[tuple[Menu, ...], Instance]:
        machine = self.trace.machine
        costs = Costs(
            copy_seconds_per_byte=machine.copy_seconds_per_byte,
            min_bytes=MIN_MOVED_BYTES,
            can_offload=with_disk,
            num_passes=num_parts,
        )
        menus = build_menus(self.trace, model, costs)
        link = None
        if with_disk:
            # A block's seconds are those of all parts, its bytes those of one, which pass as often as there are parts.
            link = Link(
                write_bytes_per_second=machine.disk_write_bytes_per_second / num_parts,
                read_bytes_per_second=machine.disk_read_bytes_per_second / num_parts,
                window_bytes=WINDOW_BYTES,
                capacity_bytes=self._capacity_bytes - self.place.away_bytes,
            )
        return menus, build_instance(model, menus, budget_bytes=0, device=self.trace.device, link=link)

    def _found(
        self,
        model: StepModel,
        num_parts: int,
        treatments: dict[str, Treatment],
        resident: Resident,
        solved: tuple[Sequence[Menu], Choice] | None,
        window_bytes: int,
    ) -> Candidate:
        step = model.treated(treatments) if treatments else model.step
        actions = self._fixed_actions(num_parts)
        split_seconds = self._split_seconds(model, num_parts)
        extra_seconds, moved_bytes, bound = split_seconds, 0, 0.0
        if solved is not None:
            menus, choice = solved
            actions.extend(block_actions(menus, choice, self.trace.device))
            extra_seconds += choice.extra_seconds
            bound = choice.lower_bound_seconds + split_seconds
            moved_bytes = num_parts * sum(m.options[o].moved_bytes for m, o in zip(menus, choice.options, strict=True))
        process_bytes = resident.process_bytes + window_bytes
        fault_seconds = 0.0 if resident.is_default else resident.fault_seconds - self.plain_fault_seconds
        if not resident.is_default:
            actions.append(
                AllocatorReuse(
                    policy=resident.policy,
                    # What else grows in the process is made up for by free pages of the heap.
                    limit_bytes=0
                    if resident.cuda_setting
                    else min(process_bytes + self.process.margin_bytes(process_bytes) // 2, self.settings.budget_bytes),
                    outside_bytes=resident.outside_bytes + window_bytes,
                    cuda_setting=resident.cuda_setting,
                    saved_bytes=resident.saved_bytes or None,
                    cost_seconds=fault_seconds,
                )
            )
        return Candidate(
            actions=tuple(actions),
            process_bytes=process_bytes,
            built_bytes=self._built_bytes,
            live_bytes=live_peak_bytes(step, self.trace.device),
            extra_seconds=extra_seconds + fault_seconds + self.place.seconds,
            moved_bytes=moved_bytes,
            place=self.place,
            num_parts=num_parts,
            lower_bound_seconds=bound + self.place.seconds,
            binding=binding_reasons(self.trace, step, moved_bytes, self.place.actions),
        )

    def seconds_of(self, found: Candidate) -> float:
        """Of a step under a candidate."""
        return step_seconds(self.steady) + found.extra_seconds

    # -- answers ---------------------------------------------------------------------------------------------------

    def as_plan(self, found: Candidate) -> Plan:
        """The plan file's record of a candidate, with what would leave room for the margin where it has none."""
        made = plan_of(
            found,
            self.trace,
            self.steady,
            self.steady if self.unfused is None else self.unfused.steady,
            self.process,
            budget_bytes=self.settings.budget_bytes,
            fits=self.has_margin,
            smallest_budget_bytes=self.smallest_bytes(),
        )
        if isinstance(self.process, DeviceModel):
            made = with_device_phases(made, self.trace, self.process)
        if self.has_margin or self.settings.hardware is None:
            return made
        forecast = msgspec.structs.replace(made.forecast, relaxations=self._relaxations())
        return msgspec.structs.replace(made, forecast=forecast)

    def smallest_bytes(self) -> int:
        """The smallest budget for which a plan exists, margin included, with every tier that is there."""
        if self._smallest_bytes is None:
            leanest = [next(iter(self.places), IN_MEMORY), self.last_resort]
            self._smallest_bytes = min(self._smallest_at(place) for place in leanest if place is not None)
        return self._smallest_bytes

    def _smallest_at(self, place: Place) -> int:
        self.place = place
        return min(
            self._smallest_for(model, num_parts, with_disk)
            for model, num_parts in self._models()
            for with_disk in self._tiers()
        )

    def _smallest_for(self, model: StepModel, num_parts: int, with_disk: bool) -> int:
        menus, instance = self._instance(model, num_parts, with_disk)
        choice = solve(msgspec.structs.replace(instance, budget_bytes=smallest_feasible_bytes(instance)))
        if choice is None:
            raise PlanError("the solver found no plan at the smallest budget it gave; please report the trace")
        treatments = treatments_of_choice(menus, choice)
        step = model.treated(treatments)
        process_bytes = self._resident(step, 0).process_bytes + window_bytes_of(menus, choice)
        return self.process.budget_for(max(process_bytes, self._built_bytes))

    def infeasible(self) -> InfeasibleError:
        """Says by how much, and what would help."""
        helps, smallest = self._relaxations(), self.smallest_bytes()
        return InfeasibleError(
            infeasible_message(
                self.trace, self.settings.budget_bytes, smallest, helps, parameters_stay=self.parameters_stay
            ),
            budget_bytes=self.settings.budget_bytes,
            smallest_feasible_bytes=smallest,
            relaxations=helps,
        )

    def _relaxations(self) -> tuple[str, ...]:
        if self.settings.hardware is None:
            return relaxations(self.trace, self.settings.allow, can_split=self.settings.allow_accumulation)
        return plan_relaxations(
            self.trace,
            self.settings,
            smallest_bytes=self.smallest_bytes(),
            smallest_bytes_of=lambda trace, settings: _Search(trace, settings).smallest_bytes(),
        )
