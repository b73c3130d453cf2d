"""Every step is a checkpoint: commits a training run between its steps, and puts a new process where the last one was.

A step is committed when the next one begins, in its first forward: parameters, optimizer, schedulers and generators of
random numbers belong together then, whatever the loop did after the update. The bytes are written while that forward
and its backward run; the next update waits for them. What a forward changes, buffers, is copied first.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memwall.apply.optimizer_state.kept_space import KeptSpace
from memwall.checkpoint.begun_run import BegunRun
from memwall.checkpoint.ending import Ending
from memwall.checkpoint.instants import Instants
from memwall.checkpoint.rank_folders import RankFolders
from memwall.checkpoint.refusals import check_told_apart
from memwall.checkpoint.starting_point import StartingPoint
from memwall.checkpoint.surroundings import Surroundings
from memwall.checkpoint.together import Together
from memwall.checkpoint.training_state import fingerprint_of, parts_of_model
from memwall.checkpoint.writer import CommitTimes
from memwall.errors import MemwallError, UsageError
from memwall.patches import Patches
from memwall.planning.planfile import Plan
from memwall.store.backend import SystemBackend
from memwall.store.journal import Journal


class StepCheckpoint:
    """Commits the steps of a model, or of several that are trained together, into a directory.

    Args:
        directory: of this run alone; made where it is missing.
        every: how many steps lie between two commits.
        is_resuming: whether to continue from what is in the directory.
        backend: the operating system, or a test's substitute for it.
        together: what agrees with the other ranks of a run; None of a process that trains alone.
        rank: of this process among them.
        others: see `StartingPoint`.

    Attributes:
        run_directory: the folder that the user named; of one of several ranks, the one that has the folders of all.
        recovered_bytes, recovery_seconds: of what it had committed, all of which was read and verified.
        times: of this process's commits, once it has finished.
        space: where state that lives on disk is to be written.

    Raises:
        UsageError: the directory holds a run, and this one is not to continue it.
        StoreError: another run is using the directory, or it cannot be written to or recovered from.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int = 1,
        is_resuming: bool = False,
        backend: SystemBackend | None = None,
        together: Together | None = None,
        rank: int = 0,
        others: RankFolders | None = None,
    ) -> None:
        self.directory = self.run_directory = os.path.abspath(directory)  # a script may go to another folder
        self._journal = Journal(self.directory, backend=backend)
        self._every = every
        self._failure: MemwallError | None = None
        self.plan_in_effect: Callable[[], bytes | None] = lambda: None
        """Gives each commit the plan file to be kept with it."""
        self.space = KeptSpace(self._journal.pool)
        self.times = CommitTimes()
        try:
            self._start = StartingPoint(
                self._journal, is_resuming=is_resuming, together=together, rank=rank, others=others
            )
        except BaseException:
            self._journal.close()
            if others is not None:
                others.close()
            raise
        self.recovered_bytes, self.recovery_seconds = self._start.recovered_bytes, self._start.recovery_seconds
        self._instants = Instants(self._start.step)
        self._beside = Surroundings(self.directory, self._start.restoration)
        self._begun: BegunRun | None = None
        self._was_asked = False
        self._ending = None if together is not None else Ending()
        self._patches = Patches("commits steps to a checkpoint")

    @property
    def failure(self) -> MemwallError | None:
        """Returns what ended the run."""
        return self._failure or (None if self._begun is None else self._begun.failure)

    @property
    def resumed_steps(self) -> int:
        """Returns how many optimizer steps the run had committed when this process began."""
        return self._start.step

    def plan_for(self, budget_bytes: int | None) -> Plan | None:
        """Returns the plan under which the step to continue from was made, if it was made for this budget.

        A run that goes on under it computes as before, where an action of it changes numerics too.
        """
        # Of ranks, each may have another step until they agree, and all need one plan.
        restoration = self._start.restoration
        plan = None if restoration is None or not self._start.is_agreed else restoration.plan
        return plan if plan is not None and plan.forecast.budget_bytes == budget_bytes else None

    @property
    def steps_done(self) -> int:
        """Returns the steps of all processes of the run together."""
        return self._instants.steps_done

    @property
    def is_new(self) -> bool:
        """Tells whether nothing had been committed when this process began."""
        return self._start.restoration is None

    def _agree(self) -> None:
        """Goes back to the last step that all ranks have committed; of a process alone, stays where it is."""
        if not self._start.is_agreed:
            self._start.agree()
            self._beside.restoration = self._start.restoration
            self._instants.go_back_to(self._start.step)

    # -- a loop that cooperates --------------------------------------------------------------------------------------

    def ask(self) -> int:
        """Returns the steps that the loop is to leave out, and notes that it does."""
        self._agree()
        self._was_asked = True
        return self.resumed_steps

    def enter_loop(self, num_steps: int, stateful: dict[str, Any]) -> int:
        """Puts a new process where the last one was at the top of its loop, as far as it can be found.

        Args:
            num_steps: where the loop ends.
            stateful: what else the loop goes on with, by name: objects with `state_dict` and `load_state_dict`.

        Returns:
            The iteration to begin with.

        Raises:
            UsageError: the checkpoint was made without one of them, or with another.
        """
        self._agree()
        self._was_asked = True
        self._beside.loop.begin(stateful)
        self._beside.variables.look()
        self._instants.at_top()
        return self._start.enter_loop(self._beside, num_steps)

    def at_loop_top(self, position: int) -> None:
        """Takes down what an iteration begins with; to be called before it fetches its batch."""
        self._instants.at_top()
        if self._begun is None:
            self._beside.loop.at_top(position, is_due=False)
        else:
            self._begun.at_loop_top(position)

    # -- life cycle --------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> None:
        """Makes an empty directory the model's; to be called before anything is put on disk, which may be there.

        Raises:
            StoreError: the files cannot be written.
        """
        self._agree()
        if self._journal.last is None:
            self._journal.begin(fingerprint_of(parts_of_model(model)))

    def attach(self, model: nn.Module) -> None:
        """Begins, from within the model's first forward: restores what was committed, or makes the directory the run's.

        Raises:
            UsageError: the script would begin anew with its data.
            StoreError: the checkpoint is of another model, or there is no room.
        """
        try:
            self._begun = self._begin(model)
            check_told_apart(self.directory, model, self._beside.variables)
        except MemwallError as error:
            self._failure = error.without_frames()
            raise
        self._begun.listen(self._patches)
        if self._ending is not None:
            self._ending.listen(self._patches)

    def _begin(self, model: nn.Module) -> BegunRun:
        self._agree()
        self.prepare(model)
        if self.is_new:
            parts = parts_of_model(model)
            self._journal.data.reserve(2 * sum(part.tensor.nbytes for part in parts))
        else:
            model = self._start.enter_forward(self._beside, model, was_asked=self._was_asked)
        self._beside.look(model)
        return BegunRun(
            model,
            self._journal,
            every=self._every,
            start=self._start,
            beside=self._beside,
            instants=self._instants,
            space=self.space,
            plan_in_effect=lambda: self.plan_in_effect(),
            ending=self._ending,
        )

    def finish(self, *, completed: bool) -> None:
        """Commits the last step of a script that has ended well, from where everything lies, and nothing after that.

        What fails is in `failure`.
        """
        self._patches.undo()
        self._failure = self.failure
        begun, self._begun = self._begun, None
        try:
            if begun is not None and self._failure is None:
                begun.finish(has_last_step=completed)
            restoration = self._start.restoration
            if completed and self._failure is None and restoration is not None and restoration.model is None:
                raise UsageError(
                    f"the script ended without continuing the run in {self.directory}, which has done "
                    f"{self.resumed_steps} steps: its model was never trained, and nothing was loaded into it"
                )
        except MemwallError as error:
            self._failure = self._failure or error.without_frames()
        finally:
            if begun is not None:
                self.times = begun.commits.writer.times

    def close(self, *, completed: bool) -> None:
        """Finishes what is not finished, and lets go of the directory.

        Where state or parameters are there that did not come back into memory, the end of the process lets go of it.
        """
        try:
            self.finish(completed=completed)
        finally:
            self._start.close()
            if not self.space.is_used:
                self._journal.close()

    # -- what has been trained elsewhere -----------------------------------------------------------------------------

    def commit_as(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, stateful: dict[str, Any]
    ) -> None:
        """Commits a model and an optimizer as they are, as what a run has come to with `step` steps.

        Raises:
            MemwallError: see `attach`, and the errors of a disk.
        """
        self._beside.has_companions = False  # the script that goes on has other variables than this one
        self._beside.loop.begin(stateful)
        self._beside.loop.at_top(step, is_due=False)
        self.attach(model)
        assert self._begun is not None
        self._begun.commits.step = -1  # or step 0 would be taken for one that is committed
        self._beside.optimizers = (optimizer,)
        self._instants.go_back_to(step)
        self._instants.is_between_steps = True
