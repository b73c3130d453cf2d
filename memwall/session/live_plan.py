"""The plan of a running session: recorded for, made, replaced."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from memwall.apply.optimizer_state.open_state import can_place
from memwall.apply.streaming.open_streaming import why_not_streamed
from memwall.apply.technique import allowed, usable
from memwall.errors import InfeasibleError, MemwallError, PlanError
from memwall.machine.meter import CudaMeter
from memwall.patches import undo_all
from memwall.planning.modes import has_mode
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.predict.cuda.live_cuda import held_here
from memwall.predict.first_step import FirstStep
from memwall.predict.live_device import live_process
from memwall.session.first_plan import charged, planned
from memwall.session.loop.evaluation_batch import (
    with_average,
    with_called,
    with_earlier,
    with_evaluation,
    with_loaders,
)
from memwall.session.loop.kept_weights import with_kept_weights
from memwall.session.loop.longer_batch import Shape
from memwall.session.measurements import Measurements, trained_parameters
from memwall.session.plan_in_effect import PlanInEffect
from memwall.session.ranks.agreement import Ranks
from memwall.session.ranks.shared_plan import Solve, check_equal, planned_together, save_together
from memwall.session.recorded_forms import RecordedForms
from memwall.session.recorded_step import RecordedStep
from memwall.session.step_borders import StepBorders
from memwall.trace.records import Trace

_log = logging.getLogger(__name__)


class Revision(NamedTuple):
    """Holds a plan that is to take the present one's place, and what it was made from."""

    trace: Trace
    plan: Plan
    budget_bytes: int


class LivePlan:
    """Holds the plan and makes it. A session tells it when; every method is to be called between two steps.

    Args:
        settings: what the user asked for.
        plan: one that was given; None where it is to be made from a recorded step.
        borders: knows the model and what steps it.
        measured: where moved bytes and planning are counted.
        on_plan: called when a plan stands, before it is applied.
        set_by_loop, disk_capacity_bytes, host_capacity_bytes: see `PlanInEffect`.
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
        self.in_effect = PlanInEffect(
            borders,
            measured,
            set_by_loop=set_by_loop,
            disk=settings.disk,
            disk_capacity_bytes=disk_capacity_bytes,
            host_capacity_bytes=host_capacity_bytes,
        )
        self.recorded: RecordedStep | None = None
        self.ranks: Ranks | None = None
        """The group by which this process agrees with others; None where it trains alone."""
        self.evaluated: Shape = ()
        """The largest batch that was evaluated before there was a trace."""
        self.plans_alone = False
        """Whether a plan is for this rank's report alone, since no step follows it."""
        self._borders, self._measured, self._on_plan = borders, measured, on_plan
        self._forms = RecordedForms()
        self._differentiates_backward = False

    @property
    def failure(self) -> MemwallError | None:
        """Returns what failed where no hook of the session sees it, while a step was recorded or under the plan."""
        return (self.recorded.failure if self.recorded is not None else None) or self.in_effect.failure

    def is_changed_by_hand(self) -> bool:
        """Returns whether the loop itself has changed parameters after a backward of the step being recorded."""
        return self.recorded is not None and self.recorded.is_changed_by_hand

    def is_dry_run(self) -> bool:
        """Returns whether what is recorded is no step yet: forwards whose results are gone. Ranks record together."""
        return self.recorded is not None and self.ranks is None and self.recorded.is_dry_run

    def lower_budget(self, within_bytes: int) -> None:
        """Plans for less than what was asked for: not all of it is there."""
        self.settings = msgspec.structs.replace(self.settings, budget_bytes=within_bytes)

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
            check_equal(self.ranks, self.plan, trained=trained_parameters(self._borders.attached_model))
        self._on_all("apply the plan", self.apply)

    # -- the recorded step -------------------------------------------------------------------------------------------

    def _record(self) -> None:
        model, optimizers = self._borders.attached_model, self._borders.optimizers
        here = self.in_effect
        here.measure_host()
        is_streamed = here.parameters.spill_recorded(
            model,
            optimizers,
            here.allocator,
            budget_bytes=self.settings.budget_bytes,
            host_limit_bytes=here.host_limit_bytes or 0,
        )
        self._measured.note_peak()
        self._forms.begin(model, self.settings, is_streamed=is_streamed)
        self.recorded = RecordedStep(
            model,
            optimizers,
            settings=self.settings,
            allocator=here.allocator,
            keeper=here.keeper,
            parameters=here.parameters,
            device_budget=here.device_budget,
            disk_capacity_bytes=here.disk_capacity_bytes,
            host_limit_bytes=here.host_limit_bytes,
            called=None if self._borders.is_ahead else self._borders.called,
            begins_step=self._borders.begins_step,
        )

    def unseen(self) -> AbstractContextManager[None]:
        """Has what runs be no part of the step that is recorded, if one is."""
        return nullcontext() if self.recorded is None else self.recorded.unseen()

    def stop_recording(self) -> None:
        """Takes the recording away, if there is one."""
        if self.recorded is not None:
            self.recorded.stop()
            self._measured.count_moved(self.recorded.moved_bytes, 0, is_recorded=True)
            self.in_effect.count_state(is_recorded=True)
            self.recorded = None

    def end_recording(self) -> None:
        """Ends the recorded step: what is known of it now is planned from.

        Raises:
            TraceError: it was no whole step.
        """
        assert self.recorded is not None
        trace, first = self.recorded.finish(self._borders.optimizers)
        num_batches = trace.num_micro_batches + self._borders.num_left_out
        self.trace = msgspec.structs.replace(trace, num_micro_batches=num_batches)
        if (earlier := self.settings.first_step) is not None:  # a run under another budget begins with that step again
            first = msgspec.structs.replace(first, needed_bytes=max(first.needed_bytes, earlier.needed_bytes))
        if self.trace.device == "cpu":
            first = msgspec.structs.replace(first, before_bytes=self._measured.before_bytes)
            first = with_average(with_loaders(first, self.trace), self.trace, self._borders.attached_model)
            if self._borders.phase == "evaluation":  # what has ended the recording is that one begins
                first = with_evaluation(first, self.trace, self._borders.attached_model, self._borders.input_shape)
            first = with_earlier(first, self.trace, self._borders.attached_model, self.evaluated)
            first = with_called(first, self.trace, self._borders.attached_model, self.recorded.input_shapes)
        first = with_kept_weights(first, self.trace, self._borders.attached_model)
        self.trace = charged(self.trace, first.kept_bytes)
        self._differentiates_backward = self.recorded.differentiates_backward
        self.stop_recording()
        self._measured.note_peak()  # planning begins another one
        self._measured.note_first_step(self.trace.steps[0].process_peak_bytes)
        self.settings = msgspec.structs.replace(self._forms.settled(self.settings, self.trace), first_step=first)
        for technique, handler in allowed(self.settings.allow):
            reason = technique.why_not(self.trace, self.settings.allow)
            reason = reason or handler.why_not_here(self._borders.optimizers)
            if reason is not None:
                level = logging.INFO if has_mode(self.settings.allow) else logging.WARNING
                _log.log(level, "%s is allowed, but has no effect: %s", technique.allow, reason)

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
        if self.ranks is not None and not self.plans_alone:
            self.ranks.begin_planning()

        def solve(trace: Trace, settings: Settings) -> tuple[Trace, Plan]:
            is_first, turns = not self._measured.has_plan, self._borders.turns
            return planned(trace, settings, self.in_effect.allocator, is_first=is_first, num_to_come=turns.num_to_come)

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

    def apply(self) -> None:
        """Applies the plan that stands.

        Raises:
            MemwallError: an action cannot be applied here.
        """
        assert self.plan is not None
        self._on_plan()
        self._forms.end()  # the plan's own actions take its place
        self.in_effect.apply(self.plan, self.trace, self.settings.budget_bytes)

    # -- another one -------------------------------------------------------------------------------------------------

    def revised(self, *, charged_bytes: int, held_bytes: int | None = None, for_evaluation: bool = False) -> Revision:
        """Makes a plan that knows of more bytes in the process than the present one.

        Args:
            charged_bytes: what was needed beyond the forecast.
            held_bytes: all that the process can have, where memory ran out; None where the budget stands.
            for_evaluation: whether the plan must have room for the evaluation that is known of; otherwise it has where
                a step alone did not run out of memory, and one has room for both.

        Raises:
            InfeasibleError: nothing fits.
        """
        assert self.trace is not None
        trace, settings = charged(self.trace, charged_bytes), self._present_settings()
        if held_bytes is not None:
            within_bytes = min(settings.budget_bytes, live_process(trace).budget_for(held_bytes))
            settings = msgspec.structs.replace(settings, budget_bytes=within_bytes).without_evaluation()

        def solve(trace: Trace, settings: Settings) -> tuple[Trace, Plan]:
            return trace, make_plan(trace, settings)

        if held_bytes is not None and not self._divides_batch:
            # The step that failed is to give the bits of one that did not: first without dividing its batch.
            whole = msgspec.structs.replace(settings, allow_accumulation=False)
            with suppress(InfeasibleError):
                revision = Revision(*self._solved(trace, whole, solve), settings.budget_bytes)
                if self.plan is None or revision.plan.actions != self.plan.actions:
                    return revision
        if held_bytes is None and not for_evaluation:
            with suppress(InfeasibleError):
                return Revision(*self._solved(trace, settings, solve), settings.budget_bytes)
            settings = settings.without_evaluation()
        return Revision(*self._solved(trace, settings, solve), settings.budget_bytes)

    def expect(self, first: FirstStep) -> None:
        """Plans from now on for a run of which this is known."""
        self.settings = msgspec.structs.replace(self.settings, first_step=first)

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
        self.in_effect.take_back(keeps_state=True)
        self.lower_budget(revision.budget_bytes)
        self.trace, self.plan = revision.trace, revision.plan
        self._measured.forget_steps()
        self._on_all("apply the new plan", self.apply)

    def forget_plan(self) -> None:
        """Has the step that follows recorded again, and planned from."""
        self.in_effect.take_back()
        self.trace = self.plan = None
        self.in_effect.allocator.trim()  # models and plans that are gone are no part of what the step begins with
        # What the step was recorded with has been taken back with the plan's own actions.
        self.settings = msgspec.structs.replace(self.settings, standing=())
        self._measured.forget_steps()

    def note_lost(self) -> bool:
        """Has plans from now on do nothing to a block that was found to change the training; tells whether one is new.

        That is what an action found itself, see `Handler.set_proving`.
        """
        if self.in_effect.applied is not None:
            self._measured.lost |= self.in_effect.applied.lost
        known, present = self.settings.lost, tuple(sorted(self._measured.lost))
        self.settings = msgspec.structs.replace(self.settings, lost=present)
        return present != known

    def save(self, path: Path) -> None:
        """Writes the plan that stands; of several ranks, those of all into one file.

        Raises:
            PlanError: there is no plan yet, or the file cannot be written.
            RankError: a rank is missing.
        """
        if self.plan is None:
            raise PlanError(f"{path}: there is no plan yet; it stands when the first step has ended")
        if self.ranks is None:
            self.plan.save(path)
        else:
            save_together(self.ranks, self.plan, path)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Returns the bytes that the run has moved to the next tier so far, and back."""
        self.in_effect.count_state(is_recorded=self.recorded is not None)
        out_bytes, in_bytes = self.in_effect.moved_bytes
        return self._measured.bytes_to_tier + out_bytes, self._measured.bytes_from_tier + in_bytes

    def end(self) -> None:
        """Leaves the process as it was before."""
        if self.ranks is not None:
            self.ranks.leave()
        undo_all((self.in_effect.end, self._forms.end))

    def _on_all(self, what: str, do: Callable[[], None]) -> None:
        if self.ranks is None or self.plans_alone:
            do()
        else:
            self.ranks.done_by_all(what, do)

    def _solved(self, trace: Trace, settings: Settings, solve: Solve) -> tuple[Trace, Plan]:
        if self.ranks is None or self.plans_alone:
            return solve(trace, settings)
        trained = trained_parameters(self._borders.attached_model)
        return planned_together(self.ranks, trace, settings, solve, trained=trained)

    def _present_settings(self) -> Settings:
        """Returns what the user asked for, and what of it this loop, its model and its optimizers allow."""
        model, optimizers = self._borders.attached_model, self._borders.optimizers
        reasons = ((one, handler.why_not_here(optimizers)) for one, handler in usable(self.settings.allow))
        not_here = {one: reason for one, reason in reasons if reason}
        refused = {one.allow for one in not_here if one.allow}
        here = self.in_effect
        is_above_host = here.host_limit_bytes is not None  # what the user said of the disk is not said of host memory
        meter = self._measured.meter
        # Of ranks each holds something else, and they plan together.
        held = held_here(meter.place) if isinstance(meter, CudaMeter) and self.ranks is None else None
        return msgspec.structs.replace(
            self.settings,
            allow=tuple(name for name in self.settings.allow if name not in refused),
            tier_capacity_bytes=here.host_limit_bytes if is_above_host else here.disk_capacity_bytes,
            allow_accumulation=here.is_cooperative,
            held=held,
            not_here=tuple((one.tag, reason) for one, reason in not_here.items()),
            can_move_state=can_place(optimizers),
            is_built_on_disk=here.parameters.watched == meter.device and here.parameters.away_bytes > 0,
            parameters_stay=why_not_streamed(model, optimizers)
            or ("a backward is differentiated itself (create_graph=True)" if self._differentiates_backward else ""),
        )
