"""The outer search: what to split, what to treat, how memory is reused; the cheapest plan whose forecast fits.

Per candidate: solve for live bytes, replay the treated step through the allocator, take what fragmentation adds off the
budget and solve again. The replayed peak decides; the solver only proposes.
"""

from collections.abc import Iterator, Sequence

import msgspec

from memwall.errors import InfeasibleError, PlanError, UsageError
from memwall.plan.actions import Accumulate, Action, AllocatorReuse, Autocast
from memwall.plan.blocks import find_blocks
from memwall.plan.candidate import Candidate, plan_of
from memwall.plan.explain import binding_reasons, infeasible_message, relaxations
from memwall.plan.instance import Choice, Instance, Link
from memwall.plan.legality import can_accumulate, can_offload, can_reuse_allocator
from memwall.plan.live_budgets import LiveBudgets, Shares, Tightening
from memwall.plan.menu import Costs, Menu, build_instance, build_menus
from memwall.plan.microbatch import candidate_micro_batches, with_micro_batch
from memwall.plan.orders import MIN_MOVED_BYTES, WINDOW_BYTES, block_actions, treatments_of_choice, window_bytes_of
from memwall.plan.planfile import Plan
from memwall.plan.settings import Settings
from memwall.plan.solve import smallest_feasible_bytes, solve
from memwall.predict.curve import live_peak_bytes
from memwall.predict.device import DeviceModel
from memwall.predict.hardware import Hardware
from memwall.predict.process import Process, ProcessModel, Resident
from memwall.predict.timing import smoothed
from memwall.predict.treatment import StepModel, Treatment
from memwall.trace.build import steady_step
from memwall.trace.records import Step, Trace
from memwall.units import parse_size

__all__ = ["MIN_MOVED_BYTES", "WINDOW_BYTES", "Settings", "make_plan", "plan", "steady_step"]

# What each operation of a further micro-batch costs besides its arithmetic: dispatch and launch.
_SECONDS_PER_OP = 8e-6


def plan(
    trace: Trace,
    *,
    budget: str | int,
    disk: str | None = None,
    disk_capacity_bytes: int | None = None,
    allow: Sequence[str] = (),
    global_batch: int | None = None,
    hardware: Hardware | None = None,
) -> Plan:
    """The cheapest plan under which the traced run fits `budget`.

    Where none leaves room for the forecast's error, one that fits without it: its `forecast.fits` is False.

    Args:
        budget: what the process may use on the trace's device: bytes or a size such as "10GiB".
        disk: directory of the next tier; by default the one measured when the trace was recorded.
        disk_capacity_bytes: the most to take of it; by default all that is free.
        allow: relaxations that change numerics: "precision".
        global_batch: samples per optimizer step; must be what the trace ran. Given, the plan may split it into smaller
            micro-batches that accumulate; without it the micro-batch stays.
        hardware: the device that the trace was translated to (memwall.predict.translate), where it is not here.

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
    )
    return make_plan(trace, settings)


def make_plan(trace: Trace, settings: Settings) -> Plan:
    """See `plan`.

    Raises:
        InfeasibleError: nothing fits.
    """
    search = _Search(trace, settings)
    found = search.best()
    if found is None:
        search.has_margin = False
        found = search.best()
    if found is None:
        raise search.infeasible()
    return search.as_plan(found)


class _Search:
    def __init__(self, trace: Trace, settings: Settings) -> None:
        self.trace, self.settings = trace, settings
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
        self._smallest_bytes: int | None = None

    # -- candidates ------------------------------------------------------------------------------------------------

    def best(self) -> Candidate | None:
        """The cheapest candidate that fits; the user's own micro-batch first, so that equal costs leave it alone."""
        best: Candidate | None = None
        for model, num_parts in self._models():
            found = self._best_for(model, num_parts)
            if found is not None and (best is None or found.extra_seconds < best.extra_seconds):
                best = found
            if best is not None and not best.actions:
                break
        return best

    def _models(self) -> Iterator[tuple[StepModel, int]]:
        """The step of each micro-batch there is, and how many of them the recorded one is split into."""
        whole = self.trace.micro_batch
        can_split = can_accumulate(self.trace, is_cooperative=self.settings.allow_accumulation) is None
        for micro_batch in candidate_micro_batches(self.trace) if can_split else (whole,):
            step = with_micro_batch(self.trace, self.steady, micro_batch)
            blocks = find_blocks(self.trace, step)
            yield StepModel(step, self.trace.names, blocks), whole // micro_batch if micro_batch else 1

    def _tiers(self) -> tuple[bool, ...]:
        """Whether to move bytes: without, and where there is a tier to move them to, with."""
        return (False,) if can_offload(self.trace) is not None else (False, True)

    def _best_for(self, model: StepModel, num_parts: int) -> Candidate | None:
        plain = self.process.untreated(model.step)
        if self.process.fits_untouched(
            plain.process_bytes, budget_bytes=self.settings.budget_bytes, limit_bytes=self._limit_bytes()
        ):
            return self._found(model, num_parts, {}, plain, None, 0)
        found = [self._solve_for(model, num_parts, with_disk) for with_disk in self._tiers()]
        return min((f for f in found if f is not None), key=lambda f: f.extra_seconds, default=None)

    def _fixed_actions(self, num_parts: int) -> list[Action]:
        actions: list[Action] = []
        if self.settings.autocast is not None:
            actions.append(Autocast(dtype=self.settings.autocast))
        if num_parts > 1:
            micro_batch = self.trace.micro_batch // num_parts
            actions.append(
                Accumulate(micro_batch=micro_batch, num_micro_batches=num_parts * self.trace.num_micro_batches)
            )
        return actions

    def _solve_for(self, model: StepModel, num_parts: int, with_disk: bool) -> Candidate | None:
        """Solves for several live budgets: more live bytes cost less recomputation, but more page faults."""
        menus, instance = self._instance(model, num_parts, with_disk)
        limit_bytes = self._limit_bytes()
        room_bytes = limit_bytes - self.process.base_bytes - self.process.workspace_bytes
        best: Candidate | None = None
        tried: set[tuple[int, ...]] = set()
        budgets = self.live_budgets(room_bytes, lambda: smallest_feasible_bytes(instance))
        for live_bytes in budgets:
            choice = solve(msgspec.structs.replace(instance, budget_bytes=live_bytes))
            if best is not None and (choice is None or choice.extra_seconds >= best.extra_seconds):
                break  # fewer live bytes cost more still
            if choice is None or choice.options in tried:
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

    def _resident(self, step: Step, limit_bytes: int) -> Resident:
        if can_reuse_allocator(self.trace) is not None:
            return self.process.bare(step)
        return self.process.treated(step, limit_bytes)

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
                capacity_bytes=self.settings.disk_capacity_bytes or machine.disk_free_bytes,
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
        split_seconds = (num_parts - 1) * len(model.step.ops) * _SECONDS_PER_OP
        extra_seconds, moved_bytes, bound = split_seconds, 0, 0.0
        if solved is not None:
            menus, choice = solved
            actions.extend(block_actions(menus, choice, self.trace.device))
            extra_seconds += choice.extra_seconds
            bound = choice.lower_bound_seconds + split_seconds
            moved_bytes = num_parts * sum(m.options[o].moved_bytes for m, o in zip(menus, choice.options, strict=True))
        process_bytes = resident.process_bytes + window_bytes
        fault_seconds = 0.0 if resident.is_default else resident.fault_seconds - self.plain.fault_seconds
        if not resident.is_default:
            actions.append(
                AllocatorReuse(
                    policy=resident.policy,
                    # What else grows in the process is made up for by free pages of the heap.
                    limit_bytes=min(
                        process_bytes + self.process.margin_bytes(process_bytes) // 2, self.settings.budget_bytes
                    ),
                    outside_bytes=resident.outside_bytes + window_bytes,
                    cost_seconds=fault_seconds,
                )
            )
        return Candidate(
            actions=tuple(actions),
            process_bytes=process_bytes,
            live_bytes=live_peak_bytes(step, self.trace.device),
            extra_seconds=extra_seconds + fault_seconds,
            moved_bytes=moved_bytes,
            num_parts=num_parts,
            lower_bound_seconds=bound,
            binding=binding_reasons(self.trace, step, moved_bytes),
        )

    # -- answers ---------------------------------------------------------------------------------------------------

    def as_plan(self, found: Candidate) -> Plan:
        """The plan file's record of a candidate."""
        return plan_of(
            found,
            self.trace,
            self.steady,
            self.process,
            budget_bytes=self.settings.budget_bytes,
            fits=self.has_margin,
            smallest_budget_bytes=self.smallest_bytes(),
        )

    def smallest_bytes(self) -> int:
        """The smallest budget for which a plan exists, margin included, with every tier that is there."""
        if self._smallest_bytes is None:
            self._smallest_bytes = min(
                self._smallest_for(model, num_parts, with_disk)
                for model, num_parts in self._models()
                for with_disk in self._tiers()
            )
        return self._smallest_bytes

    def _smallest_for(self, model: StepModel, num_parts: int, with_disk: bool) -> int:
        menus, instance = self._instance(model, num_parts, with_disk)
        choice = solve(msgspec.structs.replace(instance, budget_bytes=smallest_feasible_bytes(instance)))
        if choice is None:
            raise PlanError("the solver found no plan at the smallest budget it gave; please report the trace")
        treatments = treatments_of_choice(menus, choice)
        step = model.treated(treatments)
        process_bytes = self._resident(step, 0).process_bytes + window_bytes_of(menus, choice)
        return self.process.budget_for(process_bytes)

    def infeasible(self) -> InfeasibleError:
        """Says by how much, and what would help."""
        helps = relaxations(self.trace, self.settings.allow, can_split=self.settings.allow_accumulation)
        smallest = self.smallest_bytes()
        return InfeasibleError(
            infeasible_message(self.trace, self.settings.budget_bytes, smallest, helps),
            budget_bytes=self.settings.budget_bytes,
            smallest_feasible_bytes=smallest,
            relaxations=helps,
        )
