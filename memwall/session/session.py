"""A training run under a budget: records the first step, plans, applies the plan before the second, measures on.

    waiting --first forward--> recording --first forward after an optimizer step--> running

The first step runs under the safest plan there is (`recorded_step`). It is a full step; nothing is thrown away. Where
an evaluation follows it on one of several ranks, the plan waits (`recorded`) for the forward that all of them make.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from memwall.apply.offload.parking import close_once_unneeded, close_unneeded
from memwall.errors import ApplyError, MemwallError, NoEffectError, OutOfMemoryError, RankError
from memwall.patches import undo_all
from memwall.planning.planfile import Plan
from memwall.session.first_plan import asked, check_device, check_device_has, check_plan_is_for
from memwall.session.interruptions import interruptions_put_off
from memwall.session.live_plan import LivePlan
from memwall.session.measurements import Measurements, trained_parameters
from memwall.session.parallel import check_optimizer, check_parallel
from memwall.session.ranks import Ranks
from memwall.session.recovery import Recovery
from memwall.session.redo import Redo
from memwall.session.refusals import check_is_trainable_here, check_not_captured
from memwall.session.shared_plan import tell_of_failure
from memwall.session.stages import Stages
from memwall.session.step_borders import StepBorders
from memwall.session.step_clock import StepClock
from memwall.session.vector_functions import settle_first_calls
from memwall.session.watch.budget_watch import BudgetWatch, place_of
from memwall.session.watch.growth import GrowthWatch
from memwall.session.watch.step_metrics import StepLog, StepMetrics
from memwall.torch_internals.compiler import is_compiled
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.trace.records import Trace

__all__ = ["Session"]

_T = TypeVar("_T")

# An average of the weights is kept by a state dict after each step. That is no checkpoint, and page faults cost time.
_SAVED_IN_TURN = 3


class Session:
    """Trains one model under a budget; a context manager that takes everything back when it ends (`memwall.fit`)."""

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        plan: Plan | None = None,
        disk: str | None = None,
        disk_capacity_bytes: int | None = None,
        disk_bytes_per_day: int | None = None,
        allow: Sequence[str] = (),
        set_by_loop: tuple[str, ...] = (),
        within_bytes: int | None = None,
        host_capacity_bytes: int | None = None,
    ) -> None:
        """Gives either a budget or a plan.

        Args:
            within_bytes: less than the budget, where it turned out that not all of it is there.
            host_capacity_bytes: the most host memory to take below a CUDA device; None for what can be pinned.
            set_by_loop: tags of actions that the training loop itself carries out, by arguments of its own; of a
                given plan they are not applied a second time.
        """
        settings = asked(budget_bytes, plan, disk=disk, disk_bytes_per_day=disk_bytes_per_day, allow=allow)
        self.state: Literal["waiting", "recording", "recorded", "running", "closed"] = "waiting"
        self.measured = Measurements()
        self.on_plan: Callable[[Session], None] | None = None
        """Is called when a plan stands, before it is applied: the place to show it, or to object."""
        self.failure: MemwallError | None = None
        """The error that ended the run; raised again at each further forward, should the loop have caught it."""
        self._borders = StepBorders(self)
        self._live = LivePlan(
            settings,
            plan,
            borders=self._borders,
            measured=self.measured,
            on_plan=self._show_plan,
            set_by_loop=set_by_loop,
            disk_capacity_bytes=disk_capacity_bytes,
            host_capacity_bytes=host_capacity_bytes,
        )
        if within_bytes is not None:
            self._live.lower_budget(within_bytes)
        self._recovery = Recovery(self._live, self._borders, self.measured)
        self._redo = Redo(self._recovery, self._borders)
        self._log = StepLog(self.measured, lambda: self._live.moved_bytes)
        self._clock = StepClock(self._log.note_seconds)
        self._watch = BudgetWatch(self.measured, lambda: place_of(self._borders.phase, self.state))
        self._growth = GrowthWatch(
            lambda: self.measured.meter.standing_bytes(),
            budget_bytes=lambda: self.budget_bytes,
            is_compiled=lambda: any(map(is_compiled, self._borders.attached_model.modules())),
        )
        self._num_planned_for = 0
        """Optimizers that had stepped when the plan was made."""
        self._stages = Stages()
        self._is_outgrown = False
        """Whether the loop trains other models than the trace and the plan are of."""
        self._num_checked = 0
        """Steps whose effects were looked at: once in each, when all that it called has been stepped."""
        self._is_applied_inside = False
        """Whether the present plan was applied from a closure of the optimizer step that runs."""
        self._has_room = True
        """Whether free memory was returned since the last step ended."""
        self._saved_after = self._num_saved_in_turn = 0
        """Step after which a state dict was asked for last, and after how many steps in a row."""
        self._has_told = False
        """Whether other ranks know that this one has failed."""
        settle_first_calls()

    @property
    def plan(self) -> Plan | None:
        """Returns the plan that was given, or the one that stands; None until the first step has ended."""
        return self._live.plan

    @property
    def trace(self) -> Trace | None:
        """Returns the recorded first step."""
        return self._live.trace

    @property
    def budget_bytes(self) -> int:
        """Returns what was asked for, by a budget or by the plan that was given; 0 by a plan for none."""
        return self._live.budget_bytes

    @property
    def ranks(self) -> Ranks | None:
        """Returns what this process agrees with others by; None before the first step, and where it trains alone."""
        return self._live.ranks

    @property
    def on_step(self) -> Callable[[StepMetrics], None] | None:
        """Returns what is called with the figures of each training step, a step later; to be set by who wants them."""
        return self._log.on_step

    @on_step.setter
    def on_step(self, called: Callable[[StepMetrics], None] | None) -> None:
        """Has the figures of steps from now on handed to this function; to nobody with None."""
        self._log.on_step = called

    # -- life cycle ------------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module, optimizers: Optimizers, *, is_stepped_by_hand: bool = False) -> None:
        """Says which model this session trains, and what steps it. Optimizers may follow at their first steps.

        Args:
            model: one, or several as `TrainedTogether`.
            is_stepped_by_hand: there seems to be no optimizer: the loop may change parameters itself.

        Raises:
            UsageError: the budget is more than the model's CUDA device has, others move the parameters about, or it is
                no model for memwall.
            PlanError: the plan that was given is for another model, or for a device with more memory.
        """
        if self._borders.model is not None:
            raise ApplyError("this session already trains a model; use one session for each")
        check_parallel(model, optimizers_of(optimizers))
        if self.plan is not None:
            check_plan_is_for(self.plan, model)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        check_device(self._live.settings.allow, device.type)
        check_is_trainable_here(model)
        check_device_has(device, self.budget_bytes, self.plan)
        self._borders.attach(model, optimizers_of(optimizers))
        if is_stepped_by_hand:
            self._borders.is_changed_by_hand = self._live.is_changed_by_hand

    def train_also(self, model: nn.Module) -> None:
        """Says that the loop trains more, or other, models from the next step on, which is recorded anew.

        Raises:
            PlanError: a plan was given, which knows nothing of them.
        """
        if self.plan is not None and self._live.is_given:
            check_plan_is_for(self.plan, model)
        self._borders.attach_instead(model)
        self._is_outgrown = True

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, once it shows itself: before its first step.

        Raises:
            ApplyError: another one's state is on disk, where there can be one optimizer's alone.
            UsageError: it is one of DeepSpeed's.
        """
        check_optimizer(optimizer)
        if optimizer not in self._borders.optimizers:
            self._borders.add_optimizer(optimizer)
            self._live.add_optimizer(optimizer)

    def watch_building(self) -> None:
        """Has parameters go to disk as modules get them, where the budget has no room for them."""
        self._live.watch_building()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: Any) -> None:
        explained = None if error is None else self.explained(error)
        self.close(completed=error is None)
        if explained is not None:
            raise explained from error

    def explained(self, error: BaseException) -> OutOfMemoryError | None:
        """Returns what a failure to get memory means for this run, and what to do; None of any other failure."""
        return self._recovery.explained(error)

    def close(self, *, completed: bool = True, brings_back: bool = True) -> None:
        """Ends the session: the model and the process are as before. A first step that was alone is still planned.

        Args:
            brings_back: optimizer state and parameters that are on disk come back into memory, which they may have no
                room in; where the process ends next they can stay, and are fetched by whoever uses them all the same.
        """
        if self.state == "closed":
            return
        self._note_engine_failure()
        try:
            if completed:
                self._clock.settle()
            self._log.flush()
            self._live.end_showing()
            self._watch.look()
            self._watch.close()
            self._growth.close()
            self.measured.note_peak()
            if completed and self.failure is None:
                self.end_last_step()
        finally:
            take_back = partial(self._live.take_back, keeps_state=not brings_back)
            ends = (self._live.stop_recording, take_back, self._borders.let_go, self._live.end, close_once_unneeded)
            try:
                with interruptions_put_off():
                    undo_all(ends[::-1])
            finally:
                self.state = "closed"

    # -- micro-batches, for loops that cooperate --------------------------------------------------------------------

    def step(self, batch: Any, *, count: Callable[[Any], int] | None = None, over_ranks: bool = False) -> Iterator[Any]:
        """Yields the micro-batches of a batch; their losses, through `backward`, weigh as the undivided batch would.

        Example::

            for micro in session.step(batch):
                session.backward(loss_of(model, micro))
            optimizer.step()

        Args:
            batch: a tensor, or a tuple, list or dict of tensors with the samples in the first dimension.
            count: loss terms in a batch, where the loss is a mean over something else than samples: by default
                labels other than -100 if the batch has any, else samples. Of labels [samples, positions] the first
                position does not count, as for causal language models, unless transformers knows the model as another
                kind.
            over_ranks: weigh as the ranks' batches together would, undivided, in one process, where gradients are
                averaged over ranks (DistributedDataParallel, FSDP2), however many terms each rank has. By default a
                rank weighs its own terms alone, as the mean loss of a plain script does. Ranks with few terms count
                too much then.
        """
        self._live.take_batches(is_begun=self.state != "waiting")
        total_of = self._live.terms_per_rank if over_ranks else float
        yield from self._live.micro.split(batch, count, total_of=total_of)

    def backward(self, loss: Tensor) -> None:
        """Runs `loss.backward()`, weighted by the present micro-batch's share of the batch."""
        self._live.micro.backward(loss)

    def compute_gradients(
        self,
        batch: Any,
        loss_of: Callable[[Any], Tensor],
        *,
        count: Callable[[Any], int] | None = None,
        over_ranks: bool = False,
    ) -> Tensor:
        """Runs forward and backward of a batch, in micro-batches where the plan has them; returns the batch's loss.

        Where memory runs out, the whole step is done again from the state it began with, under a plan that follows from
        the failure: at most three times in a run.

        Example::

            for batch in loader:
                loss = session.compute_gradients(batch, lambda part: loss_of(model, part))
                optimizer.step()
                optimizer.zero_grad()

        Args:
            batch, count, over_ranks: as `step` takes them.
            loss_of: the mean loss of a part of the batch; it may be called several times.

        Raises:
            OutOfMemoryError: memory ran out, and the step cannot be done again.
        """

        def part() -> Tensor:
            parts = self.step(batch, count=count, over_ranks=over_ranks)
            return sum((self._live.micro.backward(loss_of(micro)) for micro in parts), start=torch.zeros(()))

        return self.redoable(part)

    def redoable(self, part: Callable[[], _T]) -> _T:
        """Runs a part of a training step, which may be run again, as `compute_gradients` says.

        Raises:
            OutOfMemoryError: memory ran out, and the step cannot be done again.
        """
        try:
            return self._redo.run(part)
        except MemwallError as error:
            self.failure = self.failure or error.without_frames()
            raise

    def first_forward(self, called: nn.Module | None = None) -> None:
        """Begins the run from within the model's first forward, whose hooks were already collected.

        Args:
            called: the one that is being called, of several.
        """
        self._borders.enter_forward(called)

    def end_step(self) -> None:
        """Says that every optimizer has stepped and gradients are dropped: what runs next is no part of the step.

        Without it the step ends at the next forward, be that of the next step or of an evaluation. Of several ranks
        each has to say so at the same point of its loop: they plan together.

        Raises:
            InfeasibleError: the step was the recorded one, and nothing fits.
            RankError: another rank failed, or does not come.
        """
        self._end_recording()
        if self.state != "recorded":
            return
        try:
            is_made = self._live.make()
        except MemwallError as error:
            self.failure = error.without_frames()
            raise
        self.state = "running" if is_made else "waiting"

    def end_last_step(self) -> None:
        """Says so at the end of the run, where other ranks may have ended: a first step that was alone is planned.

        Raises:
            InfeasibleError: nothing fits.
        """
        self._borders.end_run()
        if self._live.ranks is not None:
            self._live.ranks.leave()
        if self.state in ("recording", "recorded"):
            self._live.plans_alone = True
        self.end_step()

    def _end_recording(self) -> None:
        """Ends the recorded step, so that nothing else is recorded with it."""
        if self.state != "recording" or self._borders.in_step or self._is_outgrown:
            return
        self._redo.before_plan()
        self._num_planned_for = len(self._borders.stepped)
        self._borders.end_step()
        try:
            self._live.end_recording()
        except MemwallError as error:
            self.failure = error.without_frames()
            raise
        finally:
            self._live.stop_recording()
        self.state = "recorded"

    # -- step borders ------------------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        """Raises again what ended the run."""
        if self.state == "waiting":  # what comes first may be an evaluation
            self.measured.begin_run(self._borders.attached_model)
        self._watch.start(self.budget_bytes)
        self._watch.look()
        self._note_engine_failure()
        if self.failure is not None:
            self._tell_others()
            raise self.failure.without_frames()

    def evaluation_begins(self) -> None:
        """Ends the step, so that it is not recorded with an evaluation, and frees what the step has left."""
        if self._live.ranks is None:
            self.end_step()
        else:  # which may not evaluate
            self._end_recording()
        self._make_room()

    def saving_begins(self) -> None:
        """Frees what the last step has left, but for a script that looks at a state dict after step upon step."""
        self._watch.look()
        self._live.end_showing()
        self.measured.note_peak()
        if self.measured.num_steps > self._saved_after:
            is_next = self.measured.num_steps == self._saved_after + 1
            self._num_saved_in_turn = self._num_saved_in_turn + 1 if is_next else 1
            self._saved_after = self.measured.num_steps
        if self._num_saved_in_turn <= _SAVED_IN_TURN:
            self._make_room()

    def step_begins(self) -> None:
        """Makes and applies the plan for this step, if it is not the first one, and measures from there on."""
        close_unneeded()
        applied = self._live.applied
        device = next((p.device for p in self._borders.attached_model.parameters()), torch.device("cpu"))
        try:
            check_not_captured(device)
            self._live.end_showing()
            self.end_step()
            if self._is_outgrown or (self.state == "running" and (self._has_newcomer or self._is_new_stage())):
                self._is_outgrown = False
                self._live.stop_recording()
                self._live.forget_plan()
                self._recovery.forget_excess()
                self._borders.await_all()
                self.state = "waiting"
            if self.state == "waiting":
                self._begin_run()
            self._recovery.plan_again()
        except MemwallError as error:
            self.failure = error.without_frames()
            raise
        if self.state == "running":
            self._recovery.begin_step()
            self._growth.begin_step()
        if self._live.applied is not applied:
            self._clock.forget()
            self._is_applied_inside = self._borders.in_optimizer  # too late for an optimizer that steps already
        if self._live.applied is not None:
            self._live.applied.begin_step()
            self._live.device_budget.begin_step(can_be_redone=self._redo.is_used)
        self._log.begin_step()
        self._clock.begin(device)

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Moves the state that has no room to disk, in a step that is recorded; in others gradients must be right.

        Raises:
            NotExactError: an action of the plan has made them others.
        """
        if self._borders.in_step:
            self._live.check_proofs()
        if self._live.recorded is not None:
            self._live.recorded.before_optimizer(self._borders.optimizers)

    def optimizer_stepped(self, *, is_first: bool) -> None:
        """Notes what a step that has ended, or went on, needed, and what the plan's actions did in it."""
        self._has_room = False
        self._live.device_budget.end_step()
        self._redo.end_step()
        self._watch.look()
        self._growth.end_step()
        is_planned = self.state == "running"
        if is_planned:
            self._clock.end(is_first=is_first)
        peak_bytes = self.measured.end_step(is_planned=is_planned, is_first=is_first)
        self._log.end_step(
            peak_bytes,
            is_first=is_first,
            is_planned=is_planned,
            budget_bytes=self.budget_bytes,
            forecast_bytes=None if self.plan is None else self.plan.forecast.steady_process_bytes,
            num_actions=0 if self.plan is None else len(self.plan.actions),
        )
        if is_planned:
            self._recovery.end_step(peak_bytes)
        if not self._borders.in_step and self._num_checked < self.measured.num_steps:
            self._num_checked = self.measured.num_steps
            if not self._is_applied_inside:
                self._check_effects()
            self._live.leave_room()
        self._is_applied_inside = False

    def _check_effects(self) -> None:
        try:
            self._live.check_effects()
        except NoEffectError:
            if self._live.ranks is None:
                raise
            # Other ranks go on to the next forward: all of them end there.

    def step_skipped(self) -> None:
        """Has the next forward begin a step anew; one that was recorded is no step to plan from."""
        self._live.device_budget.end_step()
        self._redo.end_step()
        if self.state == "recording":
            self._live.stop_recording()
            self.state = "waiting"

    @property
    def _has_newcomer(self) -> bool:
        """Tells whether an optimizer has stepped whose state is in no forecast: its first step followed the plan."""
        return not self._live.is_given and len(self._borders.stepped) > self._num_planned_for

    def _is_new_stage(self) -> bool:
        """Tells whether the loop has frozen or unfrozen parameters since the step was recorded: another graph.

        One that it comes back to is not new: its plan takes the place of the present one.
        """
        stage = trained_parameters(self._borders.attached_model)
        if self._live.is_given or stage == self._stages.planned:
            self._stages.goes_on()
            return False
        present = self._live.present
        revision = self._stages.change(stage, present)
        if revision is None:
            return True
        if revision is not present:
            self._recovery.forget_excess()
            self._live.change_to(revision)
        return False

    def _begin_run(self) -> None:
        self.measured.begin_run(self._borders.attached_model)
        self._borders.watch_optimizers()
        self._stages.begin(trained_parameters(self._borders.attached_model))
        self._live.begin()
        self.state = "running" if self._live.is_given else "recording"

    def _tell_others(self) -> None:
        """Has the other ranks end where they begin their next step, if this one would have begun it too."""
        would_begin = self.state == "running" and torch.is_grad_enabled() and not self._borders.in_step
        if self._live.ranks is not None and would_begin and not self._has_told:
            self._has_told = True
            with suppress(RankError):
                tell_of_failure(self._live.ranks)

    def _make_room(self) -> None:
        if self._live.applied is not None:
            self._live.allocator.make_room(is_first=not self._has_room)
            self._has_room = True

    def _show_plan(self) -> None:
        if self.on_plan is not None:
            self.on_plan(self)

    def _note_engine_failure(self) -> None:
        self.failure = self.failure or self._live.failure
