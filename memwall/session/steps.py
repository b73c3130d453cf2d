"""The steps of one run: which of them are recorded, when a plan is made and applied, what is looked at after each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from memwall.apply.microbatch import tensors_in
from memwall.apply.offload.parking import close_unneeded
from memwall.errors import InfeasibleError, MemwallError, NoEffectError, OutOfMemoryError, RankError
from memwall.session.forward_redo import ForwardRedo
from memwall.session.live_plan import LivePlan
from memwall.session.loop.changes import LoopChanges
from memwall.session.loop.evaluation_room import EvaluationRoom
from memwall.session.loop.kept_copies import KeptCopies
from memwall.session.loop.short_batches import SparedBlocks
from memwall.session.loop.smaller_forwards import SmallerForwards
from memwall.session.loop.turns import FirstTurns
from memwall.session.measurements import Measurements
from memwall.session.ranks.joint_parts import JointParts
from memwall.session.ranks.shared_plan import agreed_excess, tell_of_failure
from memwall.session.recovery import Recovery
from memwall.session.redo import Redo
from memwall.session.refusals import check_not_captured
from memwall.session.step_borders import StepBorders
from memwall.session.step_clock import StepClock
from memwall.session.unseen_steps import UnseenSteps
from memwall.session.watch.beside_tensors import BesideTensors
from memwall.session.watch.budget_watch import BudgetWatch, place_of
from memwall.session.watch.growth import GrowthWatch
from memwall.session.watch.room import RoomBetweenSteps
from memwall.session.watch.step_metrics import StepLog
from memwall.torch_internals.dispatch import end_stand_in, out_of_inference_mode
from memwall.trace.attached import forward_of
from memwall.trace.together import models_of

State = Literal["waiting", "recording", "recorded", "running", "closed"]

_T = TypeVar("_T")


class Steps:
    """Hears where steps begin and end, and takes a run from its first step to its last.

    Attributes:
        borders: finds where steps begin and end.
        live: the plan.
        state: how far the run has come.
        failure: the error that ended it.
        recovery: decides what follows where memory ran out.
        log: hands on the figures of each step.
    """

    def __init__(self, measured: Measurements, live_plan: Callable[[StepBorders], LivePlan]) -> None:
        self.state: State = "waiting"
        self.failure: MemwallError | None = None
        self.measured = measured
        self.borders = StepBorders(self)
        self.live = live_plan(self.borders)
        self.borders.is_dry_run = self.live.is_dry_run
        self.recovery = Recovery(self.live, self.borders, self.measured)
        self._redo = Redo(self.recovery, self.borders)
        self._forwards = ForwardRedo(
            self.live, self.borders, self.recovery, self.measured, lambda: self._redo.is_running
        )
        self.borders.run_forward = self._run_forward
        self.log = StepLog(self.measured, lambda: self.live.moved_bytes)
        self._clock = StepClock(self.log.note_seconds)
        self._watch = BudgetWatch(self.measured, lambda: place_of(self.borders.phase, self.state))
        self._growth = GrowthWatch(
            budget_bytes=lambda: self.live.budget_bytes,
            model=lambda: self.borders.attached_model,
            disk=lambda: self.live.in_effect.disk,
        )
        self._kept = KeptCopies(
            lambda: self.borders.attached_model,
            lambda: self.live.settings.first_step,
            lambda: self.live.in_effect.allocator.live_bytes,
        )
        self._beside = BesideTensors(self.live.in_effect.allocator)
        self._peak_bytes: int | None = None
        """Keeps the most that was held when the present forward began; None where that is to be read anew."""
        self._unseen = UnseenSteps(
            self.measured,
            lambda: self.live.budget_bytes,
            self.live.in_effect.allocator,
            lambda: self.live.in_effect.parameters.built_bytes,
        )
        self._first_turns = FirstTurns()
        self._smaller = SmallerForwards(self.live)
        self._changes = LoopChanges(self.live, self.borders, self.recovery, self._smaller)
        self.borders.begins_anew = self._changes.begins_anew
        self._spared = SparedBlocks(self.borders, self.live)
        self._evaluations = EvaluationRoom(self.live, self.borders)
        self._num_checked = 0
        """Steps whose effects were looked at: once in each, when all that it called has been stepped."""
        self._is_applied_inside = False
        """Whether the present plan was applied from a closure of the optimizer step that runs."""
        self._called_before_plan: nn.Module | None = None
        """The model from whose call a plan was applied: that call has looked its forward up already."""
        self._room = RoomBetweenSteps(self.measured)
        self._joint: JointParts | None = None
        self._is_joint_known = False
        self._has_told = False
        """Whether other ranks know that this one has failed."""

    def outgrow(self, model: nn.Module) -> None:
        """Follows other models from the next step on, which is recorded anew."""
        if self.borders.drop_dry_run():
            self.borders.attach_instead(model)
            return
        if self.state == "running":  # the plan is not for these: their first step is recorded, not only the next one
            self.borders.end_step()
        self._changes.outgrow(model)
        self._forwards.forget()
        self._joint, self._is_joint_known = None, False

    def redoable(self, part: Callable[[], _T], batch: Any = None) -> _T:
        """Runs a part of a training step, which may be run again, see `Session.redoable`."""
        try:
            joint = self._met_for_part()
            shapes = () if joint is None else tuple(tuple(tensor.shape) for tensor in tensors_in(batch))
            return self._redo.run(part, shapes, joint)
        except MemwallError as error:
            self.failure = self.failure or error.without_frames()
            raise

    def _met_for_part(self) -> JointParts | None:
        """Has ranks agree on the plan of a step that begins, before its loop's code, which may fail on one of them.

        Returns:
            What runs parts of steps so that ranks do them again together; None where this process trains alone, or they
            do not.
        """
        if self.live.ranks is None:
            return None
        if not self.borders.in_step:
            self._note_engine_failure()
            if self.failure is not None:
                self._tell_others()
                raise self.failure.without_frames()
            self.batch_begins()
        if self.state != "running" or self.live.trace is None or not self.live.ranks.have_inputs:
            return None
        if not self.borders.in_step and (self._joint is not None or not self._is_joint_known):
            with self._measured_anew():
                self.recovery.plan_ahead(has_newcomer=self._changes.has_newcomer)
            if not self.live.ranks.have_inputs:  # one of them does not come any more
                return None
            if not self._is_joint_known:
                self._is_joint_known = True
                self._joint = JointParts.of(self.live.ranks, self.borders.attached_model, self.live.trace)
        return self._joint

    def end(self, *, completed: bool) -> None:
        """Ends what is measured; of a run that has ended well a first step that was alone is planned."""
        self._note_engine_failure()
        if completed:
            self._clock.settle()
        self.log.flush()
        self.live.in_effect.end_showing()
        self._watch.look()
        self._watch.close()
        self._growth.close()
        self._forwards.forget()
        self.measured.note_peak()
        if completed and self.failure is None:
            self.end_last_step()

    def end_step(self) -> None:
        """Ends the step, see `Session.end_step`; after the recorded one the plan is made and applied."""
        self._end_recording()
        if self.state != "recorded":
            return
        if self._awaits_turns():
            self.live.forget_plan()
            self.state = "waiting"
            return
        with self._ending_the_run():
            try:
                with out_of_inference_mode():
                    is_made = self.live.make()
            except InfeasibleError as error:
                if not self._changes.why:
                    raise
                raise error.because(f"the run has had a plan before: {self._changes.why}") from error
        self.state = "running" if is_made else "waiting"

    def batch_begins(self) -> None:
        """Makes and applies the plan for the step whose batch is about to be divided: its forward would be too late.

        Raises:
            InfeasibleError: nothing fits.
            RankError: another rank failed, or does not come.
        """
        if self.borders.in_step or self.failure is not None:
            return
        with self._measured_anew():
            self.end_step()
            if self.state == "running" and self.live.ranks is None:
                with self._ending_the_run():
                    self.recovery.plan_again()

    def inputs_end(self, completed: bool) -> None:
        """Hears that this rank has no more batches, though others may have: they go on by the plan that stands.

        Args:
            completed: whether the last step was; otherwise it has failed, as it does where all ranks are to end early.

        Raises:
            MemwallError: the first step was its last one, and there is no plan; or another rank has ended its run.
                Ranks that wait for this one, which does not take part in what they exchange, hear of it at once.
        """
        ranks = self.live.ranks
        if ranks is None or self.failure is not None:
            return
        if not completed:
            if self.borders.in_step:
                self.borders.drop_step()
                self.step_skipped()
            return
        try:
            with self._ending_the_run():
                with self._measured_anew():
                    self.end_step()
                if self.state == "recording":  # in a step that has not ended, no rank looks at the next one
                    ranks.leave_within_step()
                else:
                    agreed_excess(ranks, 0, goes_on=False)
        except MemwallError:
            self._has_told = True
            ranks.leave()
            raise

    def end_last_step(self) -> None:
        """Ends the last step, see `Session.end_last_step`."""
        self.borders.end_run()
        if self.live.ranks is not None:
            self.live.ranks.leave()
        if self.state in ("recording", "recorded"):
            self.live.plans_alone = True
        self.end_step()

    def _end_recording(self) -> None:
        """Ends the recorded step, so that nothing else is recorded with it."""
        if self.state != "recording" or self.borders.in_step or self._changes.is_outgrown:
            return
        self._redo.before_plan()
        self._changes.recording_ends()
        self.borders.end_step()
        try:
            with self._ending_the_run():
                self.live.end_recording()
        finally:
            self.live.stop_recording()
        self.state = "recorded"

    def before_forward(self) -> None:
        """Raises again what ended the run, or ends one whose steps no hook sees, and that pass the budget."""
        end_stand_in()
        if self.state == "waiting":  # what comes first may be an evaluation
            self.measured.begin_run(self.borders.attached_model)
        self._watch.start(self.live.budget_bytes)
        # What ended the last step has mostly read it already. What is shown of parameters is still to be taken off.
        is_plain = self.measured.meter.device == "cpu" and not self.live.in_effect.parameters.is_open
        self._peak_bytes = self.measured.meter.held().peak_bytes if is_plain else None
        self._watch.look(self._peak_bytes)
        self._note_engine_failure()
        applied = self.live.in_effect.applied
        if applied is not None and applied.blocks.spared:  # what a further forward of the step holds is in no account
            applied.spare(frozenset())
        if self.failure is not None:
            self._tell_others()
            raise self.failure.without_frames()
        if self.state == "waiting":
            with self._ending_the_run():
                self._unseen.forward_begins(
                    self.borders.attached_model,
                    self.borders.num_optimizer_steps,
                    trains_copies=self.borders.trains_copies,
                )

    def evaluates_before(self) -> None:
        """Hears of an evaluation before any step: what it has freed goes back before the budget is passed."""
        self._unseen.hold_heap()

    def backward_begins(self, trains: Callable[[], bool]) -> None:
        """Hears of a backward of a script that has called no model: ends the run where its steps pass the budget."""
        self._watch.start(self.live.budget_bytes)
        self._watch.look()
        with self._ending_the_run():
            self._unseen.backward_begins(trains)

    def _run_forward(self, model: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward, and runs it again where memory runs out and that can be."""
        called_before_plan, self._called_before_plan = self._called_before_plan, None
        if called_before_plan is model:
            return forward_of(model)(*args, **kwargs)  # which comes here again, through what the plan has put around it
        self._smaller.begin_forward(model, args, kwargs)
        try:
            return self._forwards.run(model, forward, args, kwargs)
        except OutOfMemoryError as error:
            self.failure = self.failure or error.without_frames()
            raise

    def evaluation_begins(self) -> None:
        """Ends the step, so that it is not recorded with an evaluation, and frees what the step has left."""
        if self.live.ranks is None:
            self.end_step()
            with self._measured_anew(), out_of_inference_mode():
                self._evaluations.make()
        else:  # which may not evaluate
            self._end_recording()
        self._make_room()

    def saving_begins(self) -> None:
        """Frees what the last step has left, but for a script that looks at a state dict after step upon step."""
        self._watch.look()
        self.live.in_effect.end_showing()
        self.measured.note_peak()
        if not self._room.is_saved_in_turn():
            self._make_room()
            if self.state == "running" and self._counts_kept:
                self._kept.saving_begins()
            self.live.in_effect.device_budget.saving_begins()

    def array_begins(self, tensor: Tensor) -> None:
        """Makes room for copies of a weight: a digest's are numpy's, which the heap does not give way to."""
        self.live.in_effect.leave_room_beside(tensor)

    @property
    def _counts_kept(self) -> bool:
        """Tells whether another plan may be made for what a loop comes to hold: ranks would have to agree on that."""
        is_alone = self.live.ranks is None and not self.live.in_effect.is_cooperative
        return is_alone and self.measured.meter.device == "cpu"

    def step_begins(self) -> None:
        """Makes and applies the plan for this step, if it is not the first one, and measures from there on."""
        close_unneeded()
        self._room.before_step()
        num_changes = self.live.in_effect.num_changes
        if self._counts_kept:
            come_bytes = self._kept.begin_step() if self.state == "running" else 0
            risen_bytes = self._beside.begin_step(self.live.plan, num_changes)
            if not self._changes.is_longer:  # of that batch one step is recorded, and everything counted anew
                self.recovery.note_kept(come_bytes, risen_bytes)
        device = self._changes.layers.device
        try:
            self._find_plan(device)
        except MemwallError as error:  # as `_ending_the_run` does, in each step and by fewer calls
            self.failure = error.without_frames()
            raise
        if self.state == "recording":
            self._spared.note_recorded()
        is_on_device = self.measured.meter.device != "cpu"
        if self.state == "running":
            if is_on_device:
                self.live.in_effect.device_budget.begin_step()
            is_same = self.live.in_effect.num_changes == num_changes
            peak_bytes = self._peak_bytes if is_same else None
            if peak_bytes is None:
                peak_bytes = self.measured.held_peak_bytes()
            self.recovery.begin_step(peak_bytes, is_told=self.log.on_step is not None)
            self._growth.begin_step(self.measured.standing_bytes or self.measured.meter.now_bytes(), device)
        if self.live.in_effect.num_changes != num_changes:
            self._clock.forget()
            self._room.restart()
            self._is_applied_inside = self.borders.in_optimizer  # too late for an optimizer that steps already
            called, applied = self.borders.called, self.live.in_effect.applied
            if self.borders.in_first_forward and called is not None and applied is not None:
                self._called_before_plan = called if applied.blocks.treats(called) else None
        if self.live.in_effect.applied is not None:
            if self._room.is_made:  # malloc may keep what a save or an evaluation has freed
                self.live.in_effect.allocator.trim(generation=1)
            self.live.in_effect.applied.begin_step()
            if self.live.in_effect.applied.handlers:
                self._spared.begin_step(self.live.in_effect.applied)
            if self.borders.is_stepped_by_hand:
                self.live.in_effect.leave_room_in_step()
            if is_on_device:
                self.live.in_effect.device_budget.watch_step(can_be_redone=self._redo.is_used)
        self.log.begin_step()
        self._clock.begin(device)

    def _find_plan(self, device: torch.device) -> None:
        """Makes, keeps or changes the plan for the step that begins, or has that one recorded."""
        check_not_captured(device)
        self.live.in_effect.end_showing()
        if self.state != "running":
            self.end_step()
        if self.live.ranks is not None:
            self.recovery.agree(has_newcomer=self._changes.has_newcomer, is_longer=self._changes.is_longer)
        if self._changes.are_to_be_recorded(is_running=self.state == "running"):
            self.live.stop_recording()
            self.live.forget_plan()
            self.recovery.forget_excess()
            self.borders.await_all()
            self.borders.let_go_optimizers()
            self.state = "waiting"
        if self.state == "waiting":
            self._begin_run()
        self.recovery.plan_again()

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves the state that has no room to disk, in a step that is recorded; in others gradients must be right.

        Raises:
            NotExactError: an action of the plan has made them others.
        """
        if self.borders.in_step:
            self.live.in_effect.check_proofs()
        if self.measured.meter.device != "cpu":
            self.live.in_effect.device_budget.optimizer_begins(optimizer, self.recovery.make_room)
        if self.live.recorded is not None:
            self.live.recorded.before_optimizer(self.borders.optimizers)

    def optimizer_stepped(self, *, is_first: bool) -> None:
        """Notes what a step that has ended, or went on, needed, and what the plan's actions did in it."""
        self._room.is_made = False
        self.live.in_effect.device_budget.end_step()
        self._redo.end_step()
        self._growth.end_step()
        is_planned = self.state == "running"
        if is_planned:
            self._clock.end(is_first=is_first)
        applied = self.live.in_effect.applied
        is_proof = applied is not None and applied.is_proving
        peak_bytes = self.measured.end_step(is_planned=is_planned, is_proof=is_proof, is_first=is_first)
        self._watch.look(peak_bytes)
        if self.log.on_step is not None:
            self.log.end_step(
                peak_bytes,
                self.live.trace,
                self.live.plan,
                is_first=is_first,
                is_planned=is_planned,
                budget_bytes=self.live.budget_bytes,
            )
        if is_planned and not self._spared.were_misjudged(self.measured.last_peak_bytes):
            self.recovery.end_step(self.measured.last_peak_bytes)
        if not self.borders.in_step and self._num_checked < self.measured.num_steps:
            self._num_checked = self.measured.num_steps
            if not self._is_applied_inside:
                self._check_effects()
            self.live.in_effect.leave_room(self._room)
        elif self.borders.have_all_stepped:  # the step has gone on since its first optimizer stepped
            self.live.in_effect.leave_room(self._room)
        self._is_applied_inside = False

    def _check_effects(self) -> None:
        try:
            self.live.in_effect.check_effects()
        except NoEffectError:
            if self.live.ranks is None:
                raise
            # Other ranks go on to the next forward: all of them end there.

    def step_skipped(self) -> None:
        """Has the next forward begin a step anew; one that was recorded is no step to plan from."""
        self.live.in_effect.device_budget.end_step()
        self._redo.end_step()
        if self.state == "recording":
            self.live.stop_recording()
            self.state = "waiting"

    def _awaits_turns(self) -> bool:
        """Tells whether a plan would be of some of the models alone, as of a critic before its generator's turn."""
        if self.live.plans_alone or self.live.ranks is not None or self.borders.is_stepped_by_hand:
            return False
        stepped = [optimizer for one in self.borders.stepped if (optimizer := one()) is not None]
        is_whole = self._first_turns.are_whole(models_of(self.borders.attached_model), stepped)
        if not is_whole:
            self.borders.await_all()
        return not is_whole

    def _begin_run(self) -> None:
        self.measured.begin_run(self.borders.attached_model)
        self.borders.watch_optimizers()
        self._changes.recording_begins()
        self._smaller.recording_begins()
        self.live.begin()
        self.state = "running" if self.live.is_given else "recording"

    def _tell_others(self) -> None:
        """Has the other ranks end where they begin their next step, if this one would have begun it too."""
        would_begin = self.state == "running" and self.borders.trains and not self.borders.in_step
        if self.live.ranks is not None and would_begin and not self._has_told:
            self._has_told = True
            with suppress(RankError):
                tell_of_failure(self.live.ranks)

    def _make_room(self) -> None:
        if self.live.in_effect.applied is not None:
            self.live.in_effect.allocator.make_room(is_first=self._room.begin_making())

    def _note_engine_failure(self) -> None:
        self.failure = self.failure or self.live.failure

    @contextmanager
    def _ending_the_run(self) -> Iterator[None]:
        """Has an error of memwall's end the run: each further forward raises it again."""
        try:
            yield
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    @contextmanager
    def _measured_anew(self) -> Iterator[None]:
        """Leaves out what was measured of a plan that another one takes the place of meanwhile."""
        num_changes = self.live.in_effect.num_changes
        yield
        if self.live.in_effect.num_changes != num_changes:
            self._clock.forget()
            self._room.restart()
