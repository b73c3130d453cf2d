"""Every step is a checkpoint: commits a training run between its steps, and puts a new process where the last one was.

A step is committed when the next one begins, in its first forward: parameters, optimizer, schedulers and generators of
random numbers belong together then, whatever the loop did after the update. The bytes are written while that forward
and its backward run; the next update waits for them. What a forward changes, buffers, is copied first.
"""

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from memwall.apply.optimizer_state.kept_space import KeptSpace
from memwall.checkpoint.discovery import HELPERS, Helpers, find_optimizer, objects_of
from memwall.checkpoint.layout import CommitLayout
from memwall.checkpoint.loop import LoopState
from memwall.checkpoint.on_disk import find_on_disk
from memwall.checkpoint.restoration import Content, Restoration
from memwall.checkpoint.training_state import (
    decode_objects,
    encode_objects,
    fingerprint_of,
    optimizer_objects,
    parts_of_model,
    parts_of_optimizer,
    random_states,
    restore_random_states,
)
from memwall.checkpoint.writer import CommitTimes, CommitWriter, Packed
from memwall.errors import MemwallError, UsageError
from memwall.patches import Patches
from memwall.planning.planfile import Plan
from memwall.store.backend import SystemBackend, round_up
from memwall.store.journal import Journal, Stored
from memwall.torch_internals.autograd import current_node, version_of
from memwall.trace.attached import attach_hook
from memwall.trace.optimizers import joint_name, trains

__all__ = ["StepCheckpoint"]

_log = logging.getLogger(__name__)


class StepCheckpoint:
    """Commits the steps of one model and one optimizer into a directory; see the module.

    Args:
        directory: of this run alone; made where it is missing.
        every: how many steps lie between two commits.
        is_resuming: whether to continue from what is in the directory.
        backend: the operating system, or a test's substitute for it.

    Attributes:
        resumed_steps: optimizer steps that the run had committed when this process began.
        steps_done: of all processes of the run together.
        failure: what ended the run.
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
    ) -> None:
        self.directory = os.fspath(directory)
        self._journal = Journal(directory, backend=backend)
        self._every = every
        self.failure: MemwallError | None = None
        self.plan_in_effect: Callable[[], bytes | None] = lambda: None
        """Asked at each commit for the plan file to be kept with it."""
        self.space = KeptSpace(self._journal.pool)
        self._restoration: Restoration | None = None
        self.resumed_steps = self.recovered_bytes = 0
        self.recovery_seconds = self._journal.recovery_seconds
        self.times = CommitTimes()
        try:
            self._open(is_resuming=is_resuming)
        except BaseException:
            self._journal.close()
            raise
        self.steps_done = self.resumed_steps
        self._committed_steps = self.resumed_steps
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._writer: CommitWriter | None = None
        self._helpers = Helpers()
        self._layout = CommitLayout()
        self._num_commits = 0
        self._is_between_steps = False
        self._is_overlapped = True
        self._to_check: list[tuple[Packed, Stored]] = []
        """Buckets of the first commit, to be compared with memory just before the update."""
        self._was_asked = False
        self._loop = LoopState()
        self._patches = Patches("commits steps to a checkpoint")

    def _open(self, *, is_resuming: bool) -> None:
        found = self._journal.last
        if found is None:
            return
        if not is_resuming:
            raise UsageError(
                f"--checkpoint {self.directory} holds step {found.step} of a run; continue it with --resume, or give "
                "this run a directory of its own"
            )
        self._restoration, self.resumed_steps = Restoration(self._journal, found), found.step
        self.recovered_bytes = sum(stored.num_bytes for stored in found.buckets)

    def plan_for(self, budget_bytes: int | None) -> Plan | None:
        """The plan under which the step to continue from was made, if it was made for this budget.

        A run that goes on under it computes as before, where an action of it changes numerics too.
        """
        plan = None if self._restoration is None else self._restoration.plan
        return plan if plan is not None and plan.forecast.budget_bytes == budget_bytes else None

    @property
    def is_new(self) -> bool:
        """Whether nothing had been committed when this process began."""
        return self._restoration is None

    # -- a loop that cooperates --------------------------------------------------------------------------------------

    def ask(self) -> int:
        """The steps that the loop is to leave out; says that it does."""
        self._was_asked = True
        return self.resumed_steps

    def enter_loop(self, num_steps: int, stateful: dict[str, Any]) -> int:
        """Puts a new process where the last one was at the top of its loop, as far as it can be found; the iteration.

        Args:
            num_steps: where the loop ends.
            stateful: what else the loop goes on with, by name: objects with `state_dict` and `load_state_dict`.

        Raises:
            UsageError: the checkpoint was made without one of them, or with another.
        """
        self._was_asked = True
        self._loop.begin(stateful)
        restoration = self._restoration
        if restoration is None:
            return 0
        saved = restoration.objects["loop"]
        begin = self._loop.restore(saved, self.directory)
        # A loop that has nothing left to do never calls its model, and then saves it.
        model = restoration.find_model()
        if model is not None:
            restoration.restore_model(model)
            self._look(model)
            if begin >= num_steps and self._optimizer is not None:
                restoration.restore_state(model, self._optimizer, None)
        self._loop.restore_random(saved)
        return begin

    def at_loop_top(self, position: int) -> None:
        """Takes down what an iteration begins with. To be called before it fetches its batch."""
        self._loop.at_top(position, is_due=self._is_due)

    # -- life cycle --------------------------------------------------------------------------------------------------

    def prepare(self, model: nn.Module) -> None:
        """Makes an empty directory the model's; to be called before anything is put on disk, which may be there.

        Raises:
            StoreError: the files cannot be written.
        """
        if self._restoration is None:
            self._journal.begin(fingerprint_of(parts_of_model(model)))

    def attach(self, model: nn.Module) -> None:
        """Begins, from within the model's first forward: restores what was committed, or makes the directory the run's.

        Raises:
            UsageError: the script would begin anew with its data.
            StoreError: the checkpoint is of another model, or there is no room.
        """
        try:
            self._begin(model)
        except MemwallError as error:
            self.failure = error.without_frames()
            raise
        self._patches.push(attach_hook(model.register_forward_pre_hook, self._before_forward))
        self._patches.hook(register_optimizer_step_pre_hook, self._before_step)
        self._patches.hook(register_optimizer_step_post_hook, self._after_step)

    def _begin(self, model: nn.Module) -> None:
        restoration = self._restoration
        if restoration is None:
            self.prepare(model)
            parts = parts_of_model(model)
            self._journal.data.reserve(2 * sum(part.tensor.nbytes for part in parts))
        elif not self._was_asked:
            raise UsageError(
                f"the run in {self.directory} has done {self.resumed_steps} steps, but this script does not ask for "
                "that and would begin with its first batch again; loop over `for step in memwall.steps(NUM_STEPS)`, or "
                "begin at `memwall.resumed_steps()` and pass over the data of the steps before"
            )
        else:
            if not restoration.has_model:
                restoration.restore_model(model)
            if not self._loop.is_open:
                restore_random_states(restoration.objects["random"])
        self._look(model)
        self._model, self._writer = model, CommitWriter(self._journal)

    def _look(self, model: nn.Module) -> None:
        """Finds the optimizer and what goes with it, if they have appeared, and puts them back."""
        objects = objects_of((torch.optim.Optimizer, *HELPERS))
        self._optimizer = self._optimizer or find_optimizer(model, objects)
        self._helpers.look(model, self._optimizer, objects)
        if self._restoration is not None:
            if self._optimizer is not None and not self._restoration.has_options:
                self._restoration.restore_options(model, self._optimizer)
            self._restoration.restore_helpers(self._helpers)

    def finish(self, *, completed: bool) -> None:
        """Commits the last step of a script that has ended well, from where everything lies, and nothing after that.

        What fails is in `failure`.
        """
        self._patches.undo()
        try:
            if self._writer is not None and self.failure is None:
                self._writer.wait()
                if completed and self._is_between_steps and self.steps_done > self._committed_steps:
                    self._commit()
                    self._writer.wait()
            if self._writer is not None:
                self.times = self._writer.times
            self._writer = None
            restoration = self._restoration
            if completed and self.failure is None and restoration is not None and not restoration.has_model:
                raise UsageError(
                    f"the script ended without continuing the run in {self.directory}, which has done "
                    f"{self.resumed_steps} steps: its model was never trained, and nothing was loaded into it"
                )
        except MemwallError as error:
            self.failure = self.failure or error.without_frames()

    def close(self, *, completed: bool) -> None:
        """Finishes what is not finished, and lets go of the directory; at the end of the process, where somebody has
        state or parameters there that did not come back into memory."""
        try:
            self.finish(completed=completed)
        finally:
            if not self.space.is_used:
                self._journal.close()

    # -- hooks -------------------------------------------------------------------------------------------------------

    @property
    def _is_due(self) -> bool:
        return self.steps_done > self._committed_steps and self.steps_done % self._every == 0

    def _before_forward(self, *_: Any) -> None:
        if self.failure is not None:
            raise self.failure.without_frames()
        if self._writer is None or not torch.is_grad_enabled() or current_node() is not None:
            return
        try:
            is_first_forward, self._is_between_steps = self._is_between_steps, False
            if is_first_forward and self._is_due:
                self._commit()
                if not self._is_overlapped:
                    self._writer.wait()
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._model is None or self._writer is None:
            return
        try:
            if self._optimizer is None:
                self._optimizer = optimizer
                self._look(self._model)
            elif optimizer is not self._optimizer and trains(optimizer, self._model):
                raise UsageError(
                    f"--checkpoint {self.directory} commits one model and one optimizer, and this model is stepped by "
                    f"{joint_name((self._optimizer, optimizer))}; run it without --checkpoint, and save in the script"
                )
            if self._restoration is not None and not self._restoration.has_state:
                self._restoration.check_complete(self._helpers)
                # Not earlier: only now it is certain where the state is to live, and in which form.
                self._restoration.restore_state(self._model, optimizer, self.space.keeper_of(optimizer))
            self._writer.wait()
            self._check_first_commit()
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if optimizer is self._optimizer:
            self.steps_done += 1
            self._is_between_steps = True

    # -- committing --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _commit(self) -> None:
        """Takes down everything of the present step, and begins to write it."""
        model, optimizer, writer = self._model, self._optimizer, self._writer
        assert model is not None
        assert optimizer is not None
        assert writer is not None
        writer.wait()
        self._num_commits += 1
        self._helpers.look_now_and_then(model, optimizer)
        parts = [*parts_of_model(model), *parts_of_optimizer(model, optimizer)]
        present = [part for part in parts if part.kind != "away"]
        buckets = self._layout.pack(present)
        absent = [part for part in parts if part.kind == "away"]
        there, away = find_on_disk(model, optimizer, self.space, absent, first=len(buckets))
        self._journal.data.hold([stored.slot for stored in there])
        objects = self._objects(model, optimizer)
        content = msgspec.msgpack.encode(
            Content(tensors=(*self._layout.records, *away), objects=objects, plan=self.plan_in_effect())
        )
        if self._num_commits == 1:
            num_bytes = sum(bucket.num_bytes for bucket in buckets) + sum(stored.num_bytes for stored in there)
            self._journal.data.reserve(2 * (num_bytes + round_up(2 * len(content))))
        versions = [(part.name, part.tensor, version_of(part.tensor)) for part in present if part.kind != "volatile"]
        step, is_first = self.steps_done, self._num_commits == 1

        def finish(stored: tuple[Stored, ...]) -> None:
            changed = next((name for name, tensor, version in versions if version_of(tensor) != version), None)
            if changed is None:
                self._journal.commit(step, (*stored, *there), content)
                self._layout.stored, self._committed_steps = stored, step
            else:
                self._give_up(stored, changed)

        writer.begin(buckets, finish)
        if is_first:
            writer.wait()
            if self._committed_steps == step:
                self._to_check = list(zip(buckets, self._layout.stored, strict=True))

    def _give_up(self, stored: Iterable[Stored], name: str) -> None:
        """Something changed while it was written: what was written is a mixture, and stays uncommitted."""
        for one in stored:
            if one not in self._layout.stored:
                self._journal.data.free(one.slot)
        self._write_at_once(name)

    def _write_at_once(self, name: str) -> None:
        self._is_overlapped = False
        _log.warning(
            "%s changed between a forward and the optimizer's step; from now on each forward waits until its commit is "
            "written; change it after the optimizer's step to have commits written beside the next step",
            name,
        )

    def _check_first_commit(self) -> None:
        """Once: whether what was written is what is there just before the update.

        A forward that writes to a parameter through `.data` leaves no other trace.
        """
        assert self._writer is not None
        changed, self._to_check = self._writer.first_changed(self._to_check), []
        if changed is not None:
            self._write_at_once(changed)

    def _objects(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
        data = encode_objects(
            {
                "optimizer": optimizer_objects(model, optimizer),
                "helpers": self._helpers.states(),
                "random": random_states(),
                "loop": self._loop.take(),
                "state_dict": self._layout.state_dict_names(model),
            }
        )
        if self._num_commits == 1:
            decode_objects(data)  # what cannot be read back must not be found out when it is needed
        return data

    def commit_as(
        self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, stateful: dict[str, Any]
    ) -> None:
        """Commits a model and an optimizer as they are, as what a run has come to with `step` steps.

        Raises:
            MemwallError: see `attach`, and the errors of a disk.
        """
        self._loop.begin(stateful)
        self._loop.at_top(step, is_due=False)
        self.attach(model)
        self._optimizer, self.steps_done, self._is_between_steps = optimizer, step, True
        self._committed_steps = -1
