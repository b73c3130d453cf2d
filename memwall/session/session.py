"""A training run under a budget: records the first step, plans, applies the plan before the second, measures on.

    waiting --first forward--> recording --first forward after an optimizer step--> running

The first step runs under the safest plan there is (`recorded_step`). It is a full step; nothing is thrown away. Where
an evaluation follows it on one of several ranks, the plan waits (`recorded`) for the forward that all of them make.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn

from memwall.apply.offload.parking import close_once_unneeded
from memwall.errors import ApplyError, MemwallError, OutOfMemoryError
from memwall.patches import Patches, undo_all, with_random_numbers_kept
from memwall.planning.planfile import Plan
from memwall.session.first_plan import asked, check_asked_of, check_plan_is_for
from memwall.session.interruptions import interruptions_put_off
from memwall.session.live_plan import LivePlan
from memwall.session.loop.longer_batch import Shape
from memwall.session.measurements import Measurements
from memwall.session.parts_proof import PartsProof
from memwall.session.ranks.agreement import Ranks
from memwall.session.ranks.pipelines import Pipelines
from memwall.session.ranks.uneven_inputs import watch_joins
from memwall.session.refusals import check_is_trainable_here, check_optimizer, check_parallel
from memwall.session.step_borders import StepBorders
from memwall.session.steps import State, Steps
from memwall.session.vector_functions import settle_first_calls
from memwall.session.watch.step_metrics import StepMetrics
from memwall.torch_internals.autograd import execution_is_transformed
from memwall.torch_internals.dispatch import end_stand_in
from memwall.torch_internals.reducer import keep_groups
from memwall.trace.optimizers import Optimizers, optimizers_of
from memwall.trace.records import Trace

_T = TypeVar("_T")


class Session:
    """Trains one model under a budget; a context manager that takes everything back when it ends (`memwall.fit`)."""

    def __init__(
        self,
        *,
        budget_bytes: int | None = None,
        plan: Plan | None = None,
        disk: str | None = None,
        disk_capacity_bytes: int | None = None,
        no_disk: bool = False,
        allow: Sequence[str] = (),
        set_by_loop: tuple[str, ...] = (),
        within_bytes: int | None = None,
        host_capacity_bytes: int | None = None,
        begin_peak_bytes: int | None = None,
    ) -> None:
        """Gives either a budget or a plan.

        Args:
            within_bytes: less than the budget, where it turned out that not all of it is there.
            host_capacity_bytes: the most host memory to take below a CUDA device; None for what can be pinned.
            set_by_loop: tags of actions that the training loop itself carries out, by arguments of its own; of a
                given plan they are not applied a second time.
            begin_peak_bytes: the most that the process held before the run began; None for until now.
        """
        settings = asked(budget_bytes, plan, disk=disk, no_disk=no_disk, allow=allow)
        self.measured = Measurements.since(begin_peak_bytes)
        self.on_plan: Callable[[Session], None] | None = None
        """Is called when a plan stands, before it is applied: the place to show it, or to object."""

        def live_plan(borders: StepBorders) -> LivePlan:
            return LivePlan(
                settings,
                plan,
                borders=borders,
                measured=self.measured,
                on_plan=self._show_plan,
                set_by_loop=set_by_loop,
                disk_capacity_bytes=disk_capacity_bytes,
                host_capacity_bytes=host_capacity_bytes,
            )

        self._steps = Steps(self.measured, live_plan)
        self._parts_proof = PartsProof(self.measured.note_unproven)
        self._borders, self._live = self._steps.borders, self._steps.live
        if within_bytes is not None:
            self._live.lower_budget(within_bytes)
        with self._steps.recovery.explaining():
            settle_first_calls()
        self.pipelines = Pipelines(self._borders, self._live.unseen)
        self._patches = Patches("follows stages of pipelines, and ranks without inputs")
        self._watches_ranks = False

    @property
    def state(self) -> State:
        """Returns how far the run has come."""
        return self._steps.state

    @property
    def failure(self) -> MemwallError | None:
        """Returns the error that ended the run; raised again at each further forward, should the loop catch it."""
        return self._steps.failure

    @property
    def plan(self) -> Plan | None:
        """Returns the plan that was given, or the one that stands; None until the first step has ended."""
        return self._live.plan

    def save_plan(self, path: str | Path) -> None:
        """Writes the plan that stands into a file that `memwall.Plan.load` and `memwall run --plan` read.

        Of several ranks each has to call it at the same point of its loop: there is one file, which rank 0 writes, and
        where ranks train unlike models it holds a plan for each kind of them.

        Raises:
            PlanError: there is no plan yet, or the file cannot be written.
            RankError: a rank is missing.
        """
        self._live.save(Path(path))

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
        return self._steps.log.on_step

    @on_step.setter
    def on_step(self, called: Callable[[StepMetrics], None] | None) -> None:
        """Has the figures of steps from now on handed to this function; to nobody with None."""
        self._steps.log.on_step = called

    def attach(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        *,
        is_stepped_by_hand: bool = False,
        trains_copies: bool = False,
    ) -> None:
        """Says which model this session trains, and what steps it. Optimizers may follow at their first steps.

        Args:
            model: one, or several as `TrainedTogether`.
            is_stepped_by_hand: there seems to be no optimizer: the loop may change parameters itself.
            trains_copies: optimizers train what the model is called with in place of its parameters.

        Raises:
            UsageError: the budget is more than the model's CUDA device has, others move the parameters about, or it is
                no model for memwall.
            PlanError: the plan that was given is for another model, or for a device with more memory.
        """
        if self._borders.model is not None:
            raise ApplyError("this session already trains a model; use one session for each")
        check_parallel(model, optimizers_of(optimizers))
        check_is_trainable_here(model)
        check_asked_of(model, self.plan, self._live.settings.allow, self.budget_bytes)
        keep_groups(model)
        if distributed.is_available() and distributed.is_initialized():
            self.watch_ranks()
        self._borders.attach(model, optimizers_of(optimizers))
        self._borders.trains_copies = trains_copies
        if is_stepped_by_hand:
            self._borders.is_changed_by_hand = self._live.is_changed_by_hand
            self._borders.num_optimizer_steps = None
        else:
            self._borders.is_unseen = execution_is_transformed()

    def train_also(self, model: nn.Module) -> None:
        """Says that the loop trains more, or other, models from the next step on, which is recorded anew.

        Raises:
            PlanError: a plan was given, which knows nothing of them.
        """
        if self.plan is not None and self._live.is_given:
            check_plan_is_for(self.plan, model)
        self._steps.outgrow(model)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Says that an optimizer steps the model, once it shows itself: before its first step.

        Raises:
            ApplyError: another one's state is on disk, and this one cannot take its place: it does not train all that
                the other one does, the plan has gradients freed in the backward, or steps are committed.
            StoreError: beside state of optimizers that it replaces, and that the script holds, there is no room for its
                own.
            UsageError: it is one of DeepSpeed's.
        """
        check_optimizer(optimizer)
        if optimizer not in self._borders.optimizers:
            self._borders.add_optimizer(optimizer)
            self._live.in_effect.add_optimizer(optimizer)

    @property
    def has_missed_steps(self) -> bool:
        """Tells whether gradients were computed where no hook sees them, by torch.func."""
        return self._borders.is_transformed

    def watch_ranks(self) -> None:
        """Follows stages of pipelines, and ranks that run out of inputs; to be called before a model is attached."""
        if not self._watches_ranks:
            self._watches_ranks = True
            watch_joins(self._patches, self._steps.inputs_end, lambda: self.ranks)
            self.pipelines.listen(self._patches)

    def watch_building(self) -> None:
        """Has parameters go to disk as modules get them, where the budget has no room for them."""
        self._live.in_effect.watch_building(self.plan, self._live.settings.budget_bytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: Any) -> None:
        explained = None if error is None else self.explained(error)
        self.close(completed=error is None)
        if explained is not None:
            raise explained from error

    def explained(self, error: BaseException) -> OutOfMemoryError | None:
        """Returns what a failure to get memory means for this run, and what to do; None of any other failure."""
        return self._steps.recovery.explained(error)

    def close(self, *, completed: bool = True, brings_back: bool = True) -> None:
        """Ends the session: the model and the process are as before. A first step that was alone is still planned.

        Args:
            brings_back: optimizer state and parameters that are on disk come back into memory, which they may have no
                room in; where the process ends next they can stay, and are fetched by whoever uses them all the same.

        Raises:
            OutOfMemoryError: there was no room for them; after a failure (not `completed`) that is logged.
        """
        if self.state == "closed":
            return
        try:
            self._steps.end(completed=completed)
        finally:
            take_back = partial(self._live.in_effect.take_back, keeps_state=not brings_back)
            ends = (close_once_unneeded, self.measured.end_run, self._live.end, self._borders.let_go)
            replaced = [self._live.in_effect.keeper.close] * brings_back
            try:
                with self._steps.recovery.bringing_back(is_last_word=completed), interruptions_put_off():
                    undo_all((self._patches.undo, *ends, *replaced, take_back, self._live.stop_recording))
            finally:
                end_stand_in()
                self._steps.state = "closed"

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
        self._live.in_effect.take_batches(self.plan, is_begun=self.state != "waiting")
        self._steps.batch_begins()
        self._parts_proof.not_asked(self._live.in_effect.applied)
        total_of = self._live.terms_per_rank if over_ranks else float
        yield from self._live.in_effect.micro.split(batch, count, total_of=total_of)

    def backward(self, loss: Tensor) -> None:
        """Runs `loss.backward()`, weighted by the present micro-batch's share of the batch."""
        self._live.in_effect.micro.backward(loss)

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
        the failure: at most three times in a run. Ranks in DistributedDataParallel or FSDP2 do it again together if it
        is one of the first steps under a plan or has a larger batch than those before; in the former such steps average
        gradients when backward has ended, not while it runs.

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
        self._live.in_effect.take_batches(self.plan, is_begun=self.state != "waiting")
        total_of: Callable[[int], float] = float
        if over_ranks:  # here, where none of the ranks has failed in its part
            total = self._live.terms_per_rank(self._live.in_effect.micro.num_terms(batch, count))

            def total_of(_: int) -> float:
                return total

        def part() -> Tensor:
            self._steps.batch_begins()
            if self.state == "running" and not self._borders.in_step:
                self._parts_proof.before_step(self._live.in_effect.applied, batch, loss_of, count)
            parts = self._live.in_effect.micro.split(batch, count, total_of=total_of)
            return sum(
                (self._live.in_effect.micro.backward(loss_of(micro)) for micro in parts),
                start=torch.zeros((), dtype=torch.float32),
            )

        return self.redoable(part, batch)

    def redoable(self, part: Callable[[], _T], batch: Any = None) -> _T:
        """Runs a part of a training step, which may be run again, as `compute_gradients` says.

        Args:
            part: runs forward and backward; it may be called several times.
            batch: what it trains on. Without it ranks take each step for one in which memory may run out.

        Raises:
            OutOfMemoryError: memory ran out, and the step cannot be done again.
            RankError: it did on another rank.
        """
        return self._steps.redoable(part, batch)

    def evaluates_before(self) -> None:
        """Says that the script evaluates a model on a CPU before this session follows any."""
        self._steps.evaluates_before()

    def note_evaluated(self, shape: Shape) -> None:
        """Says how large a batch the script has evaluated before this session followed its model; () for none."""
        self._live.evaluated = shape

    def first_forward(self, called: nn.Module | None = None) -> None:
        """Begins the run from within the model's first forward, whose hooks were already collected.

        Args:
            called: the one that is being called, of several.
        """
        self._borders.enter_forward(called)

    def backward_begins(self, trains: Callable[[], bool] = lambda: True) -> None:
        """Says that a loop which has called no model until now begins a backward: its steps are watched, not planned.

        Args:
            trains: returns whether the backward may be one of a training step; asked while steps are judged.

        Raises:
            InfeasibleError: they have passed the budget.
        """
        self._steps.backward_begins(trains)

    def end_step(self) -> None:
        """Says that every optimizer has stepped and gradients are dropped: what runs next is no part of the step.

        Without it the step ends at the next forward, be that of the next step or of an evaluation. Of several ranks
        each has to say so at the same point of its loop: they plan together.

        Raises:
            InfeasibleError: the step was the recorded one, and nothing fits.
            RankError: another rank failed, or does not come.
        """
        self._steps.end_step()

    def end_last_step(self) -> None:
        """Says so at the end of the run, where other ranks may have ended: a first step that was alone is planned.

        Raises:
            InfeasibleError: nothing fits.
        """
        self._steps.end_last_step()

    def _show_plan(self) -> None:
        if self.on_plan is not None:
            with with_random_numbers_kept():
                self.on_plan(self)
