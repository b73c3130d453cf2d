"""A run from its first forward on: when a step is committed, and what the first update of a new process puts back."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memwall.apply.optimizer_state.kept_space import KeptSpace
from memwall.checkpoint.commits import Commits, find_on_disk
from memwall.checkpoint.ending import Ending
from memwall.checkpoint.instants import Instants
from memwall.checkpoint.refusals import steps_beside, steps_in_between
from memwall.checkpoint.starting_point import StartingPoint
from memwall.checkpoint.surroundings import Surroundings
from memwall.checkpoint.training_state import parts_of_optimizer
from memwall.errors import MemwallError
from memwall.patches import Patches
from memwall.store.journal import Journal
from memwall.torch_internals.autograd import current_node
from memwall.trace.attached import attach_hook
from memwall.trace.optimizers import trains
from memwall.trace.together import models_of


class BegunRun:
    """Commits the steps of a model that has begun to train.

    Args:
        model: in the order of the checkpoint.
        journal: begun.
        every: how many steps lie between two commits.
        start: where this process began.
        beside: what belongs to a step beside the model.
        instants: counts the steps.
        space: where state that lives on disk is written.
        plan_in_effect: gives the plan file to be kept with a commit.
        ending: hears that the run is to end; None of one of several ranks.

    Attributes:
        commits: writes them, and knows the last one.
        failure: what ended the run, as far as a forward or an update met it.
    """

    def __init__(
        self,
        model: nn.Module,
        journal: Journal,
        *,
        every: int,
        start: StartingPoint,
        beside: Surroundings,
        instants: Instants,
        space: KeptSpace,
        plan_in_effect: Callable[[], bytes | None],
        ending: Ending | None,
    ) -> None:
        self._model, self._directory, self._every = model, journal.directory, every
        self._start, self._beside, self._instants, self._space = start, beside, instants, space
        self._plan_in_effect, self._ending = plan_in_effect, ending
        self.commits = Commits(journal, step=start.step)
        self.failure: MemwallError | None = None
        self._ends_here = False
        """Whether the run ends with the next commit, for which all is taken down."""

    @property
    def _is_due(self) -> bool:
        steps_done = self._instants.steps_done
        return steps_done > self.commits.step and (self._ends_here or steps_done % self._every == 0)

    def listen(self, patches: Patches) -> None:
        """Has the model's forwards and all optimizers' steps call this, until the patches are undone."""
        for each in models_of(self._model):
            patches.push(attach_hook(each.register_forward_pre_hook, self._before_forward))
        patches.hook(register_optimizer_step_pre_hook, self._before_step)
        patches.hook(register_optimizer_step_post_hook, self._after_step)

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Keeps what fails as what has ended the run."""
        try:
            yield
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def at_loop_top(self, position: int) -> None:
        """Takes down what an iteration begins with."""
        self._ends_here = self._ending is not None and self._ending.is_asked
        if self._is_due:
            self._beside.look_beside(self._model)
        self._beside.loop.at_top(position, is_due=self._is_due)

    def _before_forward(self, *_: Any) -> None:
        """Commits the step before, in the first forward after it; a run that is to end ends here."""
        if self.failure is not None:
            raise self.failure.without_frames()
        with self._noting_failure():
            if current_node() is not None:
                return
            if not torch.is_grad_enabled():
                if self._instants.is_between_steps and self._is_due:
                    self._beside.loop.keep_buffers(self._model)
            elif self._instants.called():
                self._step_begins()

    def _step_begins(self) -> None:
        if self._ending is not None:
            self._ending.step_begins(self.commits.writer.times.mean_seconds)
            self._ends_here = self._ends_here or (self._ending.is_asked and not self._beside.loop.is_open)
        if self._is_due:
            self._commit()
        if self._ending is not None and self._ends_here:
            self.commits.writer.wait()
            self._ending.end()

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with self._noting_failure():
            self._update_begins(optimizer)

    def _update_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Has an update wait for what is written, and puts the optimizers' state back before the first one."""
        if self._beside.optimizers and not trains(optimizer, self._model):
            self.commits.writer.wait()  # its parameters may be among what is written
            is_between = self._instants.is_between_steps and not self._beside.loop.is_open
            if is_between and self._beside.companions.trains_with(optimizer):
                raise steps_in_between(self._directory, optimizer)
            return
        restoration = self._start.restoration
        if not self._beside.optimizers:
            self._beside.join(self._model, optimizer)
        if optimizer not in self._beside.optimizers and trains(optimizer, self._model):
            if restoration is not None and not self._instants.has_stepped:
                raise restoration.is_of_others(self._model, optimizer)
            known = self._beside.optimizers
            raise steps_beside(self._directory, known, optimizer, has_tops=self._beside.loop.is_open)
        if not self._instants.has_stepped:
            self._beside.settle(self._model)
        if restoration is not None and not restoration.has_state:
            self._beside.check_complete(restoration)
            # Not earlier: only now it is certain where the state is to live, and in which form.
            restoration.restore_state(self._model, self._beside.optimizers, self._space.keeper_of)
        self.commits.writer.wait()
        self.commits.check_first()
        self._start.wait_for_all(self.commits.step)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Counts the step of an optimizer that is committed."""
        if optimizer in self._beside.optimizers:
            self._instants.stepped()

    def finish(self, *, has_last_step: bool) -> None:
        """Waits for what is written.

        Args:
            has_last_step: whether the script has ended well, so that its last step is committed from where everything
                lies.
        """
        self.commits.writer.wait()
        if has_last_step and self._instants.is_between_steps and self._instants.steps_done > self.commits.step:
            self._commit(is_last=True)
            self.commits.writer.wait()

    @torch.no_grad()
    def _commit(self, *, is_last: bool = False) -> None:
        """Takes down everything of the present step, and begins to write it; of the last one the script has ended."""
        model, optimizers = self._model, self._beside.optimizers
        self.commits.writer.wait()
        self._beside.look_now_and_then(model)
        if not (self._beside.loop.is_open or is_last):
            self._beside.look_beside(model)
        beside = self._beside.take()
        if beside is None:
            return
        self._beside.name_uncommitted()
        parts = self._beside.loop.parts_at_top(model)
        for number, optimizer in enumerate(optimizers):
            parts += parts_of_optimizer(model, optimizer, number)
        parts += beside.parts
        absent = [part for part in parts if part.kind == "away"]
        self.commits.begin(
            self._instants.steps_done,
            [part for part in parts if part.kind != "away"],
            lambda: self._beside.encoded(model, beside.objects, self.commits.state_dict_names(model)),
            self._plan_in_effect(),
            lambda first: find_on_disk(model, optimizers, self._space, absent, first=first),
        )
