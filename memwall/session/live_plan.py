"""The plan of a running session: recorded for, made, applied, replaced, taken back."""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
import torch
from torch.utils.hooks import RemovableHandle

from memwall.apply.applied import AppliedPlan
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.memory.cuda_setting import restore_variables
from memwall.apply.memory.ddp_buckets import when_rebuilt
from memwall.apply.microbatch import MicroBatches
from memwall.apply.optimizer_state.state_keeper import StateKeeper, can_place
from memwall.apply.streaming.parameter_keeper import ParameterKeeper, is_streamed, why_not_streamed
from memwall.apply.technique import allowed, handler_of
from memwall.errors import ApplyError, InfeasibleError, MemwallError
from memwall.machine.limits import pinnable_bytes
from memwall.patches import undo_all
from memwall.planning.blocks import find_blocks
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.predict.live_device import live_process
from memwall.session.device_budget import DeviceBudget
from memwall.session.evaluation_batch import with_evaluation
from memwall.session.first_plan import charged, planned
from memwall.session.measurements import Measurements
from memwall.session.ranks import Ranks
from memwall.session.recorded_forms import RecordedForms
from memwall.session.recorded_step import RecordedStep
from memwall.session.shared_plan import Solve, check_equal, planned_together
from memwall.session.step_borders import StepBorders
from memwall.session.watch.room import RoomBetweenSteps
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.sharding import local_part
from memwall.trace.records import Trace
from memwall.trace.steps import steady_step
from memwall.units import format_bytes

__all__ = ["LivePlan", "Revision"]

_log = logging.getLogger(__name__)

_NUM_COPIES = 2
"""Copies of the weights that there is room for between two steps: one in parts, and those joined into one."""


class Revision(NamedTuple):
    """Holds a plan that is to take the present one's place, and what it was made from."""

    trace: Trace
    plan: Plan
    budget_bytes: int


class LivePlan:
    """Holds the plan and applies it. A session tells it when; every method is to be called between two steps.

    Args:
        settings: what the user asked for.
        plan: one that was given; None where it is to be made from a recorded step.
        borders: knows the model and what steps it.
        measured: where moved bytes and planning are counted.
        on_plan: called when a plan stands, before it is applied.
        set_by_loop: tags of actions that the training loop carries out itself.
        disk_capacity_bytes: the most to take of the disk below a CPU's memory; None for what is free there.
        host_capacity_bytes: the most host memory to take below a CUDA device; None for what can be pinned.
    """

    def __init__(
        self,
        settings: Settings,
        plan: Plan | None,
        *,
        borders: StepBorders,
        measured: Measurements,
        on_plan: Callable[[], None],
        set_by_loop: tuple[str, ...],
        disk_capacity_bytes: int | None = None,
        host_capacity_bytes: int | None = None,
    ) -> None:
        for _, handler in allowed(settings.allow):
            settings = handler.prepare(settings)
        self.settings, self.plan = settings, plan
        self.budget_bytes = settings.budget_bytes
        """The budget that was asked for; settings have less once it turned out that less is there."""
        self.trace: Trace | None = None
        self.is_given = plan is not None
        self.is_cooperative = False
        """Whether the loop takes its micro-batches from the session."""
        self.allocator = AllocatorHandler()
        self.parameters = ParameterKeeper(settings.disk, disk_capacity_bytes)
        self.keeper = StateKeeper(settings.disk, disk_capacity_bytes, self.parameters.around_step)
        self.micro = MicroBatches()
        self.recorded: RecordedStep | None = None
        self.applied: AppliedPlan | None = None
        self.ranks: Ranks | None = None
        """The group by which this process agrees with others; None where it trains alone."""
        self.plans_alone = False
        """Whether a plan is for this rank's report alone, since no step follows it."""
        self._borders, self._measured, self._on_plan, self._set_by_loop = borders, measured, on_plan, set_by_loop
        self._bucket_hooks: tuple[RemovableHandle, ...] = ()
        self._room_bytes = 0
        self.device_budget = DeviceBudget()
        self._forms = RecordedForms()
        self._disk_capacity_bytes, self._host_capacity_bytes = disk_capacity_bytes, host_capacity_bytes
        self._host_limit_bytes: int | None = None
        """Host memory below a model on CUDA: what plans are made with is what they are applied with."""

    @property
    def failure(self) -> MemwallError | None:
        """Returns what failed where no hook of the session sees it: in a transfer within autograd, in an effect."""
        applied = () if self.applied is None else (self.applied.engine, self.applied.effects)
        parts = (self.recorded, *applied, self.keeper, self.parameters)
        return next((part.failure for part in parts if part and part.failure), None)

    def is_changed_by_hand(self) -> bool:
        """Returns whether the loop itself has changed parameters after a backward of the step being recorded."""
        return self.recorded is not None and self.recorded.is_changed_by_hand

    def watch_building(self) -> None:
        """Has parameters go to disk as they are made, where there is no room for them."""
        is_possible = not torch.cuda.is_available()
        if self.plan is not None:
            is_possible &= any(handler_of(action).can_be_built_away for action in self.plan.actions)
        if is_possible and self.settings.budget_bytes:
            self.parameters.watch_building(self.settings.budget_bytes, self.allocator)

    def lower_budget(self, within_bytes: int) -> None:
        """Plans for less than what was asked for: not all of it is there."""
        self.settings = msgspec.structs.replace(self.settings, budget_bytes=within_bytes)

    def take_batches(self, *, is_begun: bool) -> None:
        """Divides the batches that the loop hands over, from now on.

        Args:
            is_begun: whether the run's first forward has been called. A given plan is applied in there, too late for
                the batch that it is fed from.
        """
        self.is_cooperative = True
        if not is_begun and self._borders.model is not None:
            self.micro.follow(self._borders.model)
            given = self.plan.actions if self.plan is not None else ()
            self.micro.divide_into(next((p[0] for a in given if (p := technique_of(a).batch_parts(a))), None))

    def terms_per_rank(self, num_terms: int) -> float:
        """Returns by how many loss terms all ranks divide, of a batch with so many on this one.

        Raises:
            ApplyError: a rank has a batch without one.
            RankError: a rank is missing.
        """
        self.ranks = self.ranks or Ranks.meet()
        return num_terms if self.ranks is None else self.ranks.terms_per_rank(num_terms)

    def begin(self) -> None:
        """Applies the plan that was given, or begins to record, before the run's first step; on all ranks or on none.

        Raises:
            RankError: another rank cannot, is missing, or was given another plan.
            MemwallError: an action cannot be applied here, or the disk cannot be used.
        """
        self.ranks = self.ranks or Ranks.meet()
        if not self.is_given:
            self._on_all("record its first step", self._record)
            return
        if self.ranks is not None and self.plan is not None:
            check_equal(self.ranks, self.plan)
        self._on_all("apply the plan", self.apply)

    # -- the recorded step -------------------------------------------------------------------------------------------

    def _record(self) -> None:
        model, optimizers = self._borders.attached_model, self._borders.optimizers
        is_streamed = self.parameters.spill_recorded(
            model, optimizers, self.allocator, budget_bytes=self.settings.budget_bytes
        )
        self._measured.note_peak()
        self._host_limit_bytes = self._host_limit()
        self._forms.begin(model, self.settings, is_streamed=is_streamed)
        self.recorded = RecordedStep(
            model,
            optimizers,
            settings=self.settings,
            allocator=self.allocator,
            keeper=self.keeper,
            parameters=self.parameters,
            disk_capacity_bytes=self._disk_capacity_bytes,
            host_limit_bytes=self._host_limit_bytes,
            called=self._borders.called,
            begins_step=self._borders.begins_step,
        )

    def stop_recording(self) -> None:
        """Takes the recording away, if there is one."""
        if self.recorded is not None:
            self.recorded.stop()
            self._measured.count_moved(self.recorded.moved_bytes, 0, is_recorded=True)
            self._count_state(is_recorded=True)
            self.recorded = None

    def end_recording(self) -> None:
        """Ends the recorded step: what is known of it now is planned from.

        Raises:
            TraceError: it was no whole step.
        """
        assert self.recorded is not None
        self.trace, first = self.recorded.finish(self._borders.optimizers)
        first = with_evaluation(first, self.trace)
        self.stop_recording()
        self._measured.note_peak()  # planning begins another one
        self._measured.note_first_step(self.trace.steps[0].process_peak_bytes)
        self.settings = msgspec.structs.replace(
            self._forms.settled(self.settings, self.trace), first_step=first if self.trace.device == "cpu" else None
        )
        for technique, handler in allowed(self.settings.allow):
            reason = technique.why_not(self.trace, self.settings.allow)
            reason = reason or handler.why_not_here(self._borders.optimizers)
            if reason is not None:
                _log.warning("%s is allowed, but has no effect: %s", technique.allow, reason)

    def make(self) -> bool:
        """Plans from the recorded step, together with all ranks, and applies the plan.

        Returns:
            False if the next step has to be recorded, with what the user allowed: from observed bytes, not computed
            ones.

        Raises:
            InfeasibleError: nothing fits.
            RankError: another rank failed, or is missing.
        """
        assert self.trace is not None
        begin = time.perf_counter()

        def solve(trace: Trace, settings: Settings) -> tuple[Trace, Plan]:
            return planned(trace, settings, self.allocator)

        try:
            self.trace, self.plan = self._solved(self.trace, self._present_settings(), solve)
        except InfeasibleError:
            is_running = self._borders.in_first_forward
            if not self._forms.change(self._borders.attached_model, self.settings, self.trace, is_running=is_running):
                raise
            self.settings = self._forms.settled(self.settings, self.trace)
            return False
        self._measured.note_planning(time.perf_counter() - begin)
        self._on_all("apply the plan", self.apply)
        return True

    # -- in effect ---------------------------------------------------------------------------------------------------

    def apply(self) -> None:
        """Applies the plan that stands.

        Raises:
            MemwallError: an action cannot be applied here.
        """
        assert self.plan is not None
        self._on_plan()
        self._forms.end()  # the plan's own actions take its place
        if self._host_limit_bytes is None:  # the plan was given
            self._host_limit_bytes = self._host_limit()
        order = () if self.trace is None else tuple(b.path for b in find_blocks(self.trace, steady_step(self.trace)))
        applied = AppliedPlan(
            self._borders.attached_model,
            self.plan.actions,
            block_order=order,
            disk=self.settings.disk,
            disk_capacity_bytes=self._disk_capacity_bytes,
            allocator=self.allocator,
            micro=self.micro,
            is_cooperative=self.is_cooperative,
            is_running=self._borders.in_first_forward,
            set_by_loop=self._set_by_loop,
            optimizers=self._borders.optimizers,
            keeper=self.keeper,
            parameters=self.parameters,
            host_limit_bytes=self._host_limit_bytes,
        )
        applied.apply()
        self._count_state(is_recorded=True)
        self.applied = applied
        with without_subclass_functions():  # what is on disk is shown by memwall itself
            parameters = [p for p in self._borders.attached_model.parameters() if p.device.type == "cpu"]
            self._room_bytes = _NUM_COPIES * sum(local_part(p).nbytes for p in parameters if not is_streamed(p))
        self._bucket_hooks = when_rebuilt(self._borders.attached_model, self._buckets_rebuilt)
        self._measured.note_peak()
        self.allocator.trim()
        if self._host_limit_bytes is not None:
            # What the plan has taken off the device since the last step is torch's still, and counts as held.
            torch.cuda.empty_cache()
            self.device_budget.hold(self._measured.meter, self.settings.budget_bytes)
        self._measured.begin_plan(None if self.trace is None else self.trace.base_bytes)
        _log.info(
            "a plan with %d actions is applied; it foresees a peak of %s",
            len(self.plan.actions),
            format_bytes(self.plan.forecast.peak.process_bytes),
        )

    def revised(self, *, charged_bytes: int, held_bytes: int | None = None) -> Revision:
        """Makes a plan that knows of more bytes in the process than the present one.

        Args:
            charged_bytes: what was needed beyond the forecast.
            held_bytes: all that the process can have, where memory ran out; None where the budget stands.

        Raises:
            InfeasibleError: nothing fits.
        """
        assert self.trace is not None
        trace, settings = charged(self.trace, charged_bytes), self._present_settings()
        if held_bytes is not None:
            within_bytes = min(settings.budget_bytes, live_process(trace).budget_for(held_bytes))
            settings = msgspec.structs.replace(settings, budget_bytes=within_bytes)

        def solve(trace: Trace, settings: Settings) -> tuple[Trace, Plan]:
            return trace, make_plan(trace, settings)

        if held_bytes is not None and not self._divides_batch:
            # The step that failed is to give the bits of one that did not: first without dividing its batch.
            whole = msgspec.structs.replace(settings, allow_accumulation=False)
            with suppress(InfeasibleError):
                revision = Revision(*self._solved(trace, whole, solve), settings.budget_bytes)
                if self.plan is None or revision.plan.actions != self.plan.actions:
                    return revision
        return Revision(*self._solved(trace, settings, solve), settings.budget_bytes)

    @property
    def present(self) -> Revision:
        """Returns the plan in effect, which was made from a recorded step."""
        assert self.trace is not None
        assert self.plan is not None
        return Revision(self.trace, self.plan, self.settings.budget_bytes)

    @property
    def _divides_batch(self) -> bool:
        """Tells whether the present plan has the loop take the batch in parts."""
        present = () if self.plan is None else self.plan.actions
        return any(technique_of(action).batch_parts(action) for action in present)

    def change_to(self, revision: Revision) -> None:
        """Applies another plan in place of the present one.

        Raises:
            MemwallError: an action cannot be applied here.
        """
        self.take_back(keeps_state=True)
        self.lower_budget(revision.budget_bytes)
        self.trace, self.plan = revision.trace, revision.plan
        self._measured.forget_steps()
        self._on_all("apply the new plan", self.apply)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, before its first step; what waited for that is applied.

        Raises:
            MemwallError: the plan cannot be applied to it.
        """
        if self.keeper.is_away:
            raise ApplyError(
                f"{type(optimizer).__name__} begins to step the model while another optimizer's state is on disk, and "
                "of several it stays in memory; have every optimizer step in the first step, hand all of them to "
                "memwall.fit(model, [first, second], budget=...), or give a larger budget"
            )
        if self.applied is not None:
            self.applied.add_optimizer(optimizer)

    def forget_plan(self) -> None:
        """Has the step that follows recorded again, and planned from."""
        self.take_back()
        self.trace = self.plan = None
        # What the step was recorded with has been taken back with the plan's own actions.
        self.settings = msgspec.structs.replace(self.settings, standing=())
        self._measured.forget_steps()

    def take_back(self, *, keeps_state: bool = False) -> None:
        """Leaves the model as it was before.

        Args:
            keeps_state: leave the optimizer's state and the parameters where they are, for the plan that follows.
        """
        self._count_state()
        for hook in self._bucket_hooks:
            hook.remove()
        if self.applied is not None:
            self._measured.count_moved(*self.applied.moved_bytes)
            applied, self.applied = self.applied, None
            applied.undo(keeps_state=keeps_state)
        if not keeps_state:
            self.parameters.bring_back()
            self.keeper.bring_back()

    def check_effects(self) -> None:
        """Notes what the plan's actions did in a step; to be called after each optimizer step.

        Raises:
            NoEffectError: an action has none.
        """
        if self.applied is not None:
            self._measured.lost |= self.applied.lost
            self.applied.check_effects()

    def check_proofs(self) -> None:
        """Checks that no action has changed the gradients; to be called before an optimizer uses them.

        Raises:
            NotExactError: one has.
        """
        if self.applied is not None:
            self.applied.check_proofs()

    def note_lost(self) -> bool:
        """Has plans from now on do nothing to a block that was found to change the training; tells whether one is new.

        That is what an action found itself, see `Handler.set_proving`.
        """
        if self.applied is not None:
            self._measured.lost |= self.applied.lost
        known, present = self.settings.lost, tuple(sorted(self._measured.lost))
        self.settings = msgspec.structs.replace(self.settings, lost=present)
        return present != known

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes that the run has moved to the next tier so far, and back."""
        self._count_state(is_recorded=self.recorded is not None)
        out_bytes, in_bytes = (0, 0) if self.applied is None else self.applied.moved_bytes
        return self._measured.bytes_to_tier + out_bytes, self._measured.bytes_from_tier + in_bytes

    def leave_room(self, room: RoomBetweenSteps) -> None:
        """Leaves room after a step for copies of the weights: scripts log, hash or keep them where no hook sees it."""
        if self.applied is not None and self._room_bytes:
            room_bytes = room.after_step(self._room_bytes)
            if room_bytes:
                self.allocator.leave_room(room_bytes)
            room.begin_looking()

    def end_showing(self) -> None:
        """Ends what was shown of parameters on disk, to save them: it is no part of the step that follows."""
        shown_bytes = self.parameters.end_showing()
        if shown_bytes:
            self._measured.note_peak(shown_bytes)
            self._measured.meter.reset_peak()

    def end(self) -> None:
        """Leaves the process as it was before, too."""
        if self.ranks is not None:
            self.ranks.leave()
        ends = (self.allocator.undo, restore_variables, self.parameters.end_building, self._forms.end)
        undo_all((*ends, self.device_budget.lift))

    def _on_all(self, what: str, do: Callable[[], None]) -> None:
        if self.ranks is None or self.plans_alone:
            do()
        else:
            self.ranks.done_by_all(what, do)

    def _solved(self, trace: Trace, settings: Settings, solve: Solve) -> tuple[Trace, Plan]:
        if self.ranks is None or self.plans_alone:
            return solve(trace, settings)
        return planned_together(self.ranks, trace, settings, solve)

    def _buckets_rebuilt(self) -> None:
        """Lets go of the buckets of the first step, which are free: what malloc keeps of them no forecast knows."""
        self.allocator.trim(generation=0)
        self.allocator.hold_limit()

    def _count_state(self, *, is_recorded: bool = False) -> None:
        """Counts what of state and parameters was moved since the last time."""
        for counts in (self.keeper.moved_bytes(), self.parameters.moved_bytes()):
            self._measured.count_moved(*counts, is_recorded=is_recorded)

    def _host_limit(self) -> int | None:
        """Returns what may be taken of host memory, for a model on CUDA; None for others."""
        if all(parameter.device.type != "cuda" for parameter in self._borders.attached_model.parameters()):
            return None
        can_pin_bytes = pinnable_bytes()
        return can_pin_bytes if self._host_capacity_bytes is None else min(can_pin_bytes, self._host_capacity_bytes)

    def _present_settings(self) -> Settings:
        """Returns what the user asked for, and what of it this loop, its model and its optimizers allow."""
        model, optimizers = self._borders.attached_model, self._borders.optimizers
        refused = {one.allow for one, handler in allowed(self.settings.allow) if handler.why_not_here(optimizers)}
        is_above_host = self._host_limit_bytes is not None  # what the user said of the disk is not said of host memory
        return msgspec.structs.replace(
            self.settings,
            allow=tuple(name for name in self.settings.allow if name not in refused),
            tier_capacity_bytes=self._host_limit_bytes if is_above_host else self._disk_capacity_bytes,
            allow_accumulation=self.is_cooperative,
            can_move_state=can_place(optimizers),
            is_built_on_disk=self.parameters.is_watching and self.parameters.away_bytes > 0,
            parameters_stay=why_not_streamed(model, optimizers) or "",
        )
