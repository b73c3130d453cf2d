"""Runs an unmodified training script under a session: finds its models and optimizers while it runs.

The first module called with gradients on that an optimizer trains is a model, and so are those that hold what else the
script's optimizers train (`trained_models`). Nothing in the script changes; what memwall hooks is taken away when the
script ends.
"""

import logging
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.offload.machine_below import machine_above_host, measured_machine
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import OutOfMemoryError, StoreError, UsageError
from memwall.integrations.preflight import check_model
from memwall.integrations.scripts.bare_steps import BareSteps
from memwall.integrations.scripts.execution import BeforeScript, ScriptEnded, execute, without_step
from memwall.integrations.scripts.processes import watch_processes
from memwall.integrations.scripts.script_profile import Profile
from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.integrations.scripts.spawned import watch_spawning
from memwall.machine.disk_location import default_directory
from memwall.machine.tiers import Machine
from memwall.patches import Patches
from memwall.session.next_budget import note_failure
from memwall.session.session import Session
from memwall.torch_internals.autograd import execution_is_transformed
from memwall.torch_internals.compiler import num_compiled
from memwall.trace.records import Trace
from memwall.trace.together import models_of

_log = logging.getLogger(__name__)


class ScriptRun:
    """Follows a script under a session, from its construction until `close`; the script may have begun before.

    Args:
        name: the script's, for messages.
        checkpoint: where its steps are committed; closed at the end as well.
        is_last: the process ends when the script has ended. What is on disk stays there then: the budget may have no
            room for it.
        has_trained: the script has trained already, and may end without another step.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        *,
        checkpoint: StepCheckpoint | None = None,
        is_last: bool = False,
        has_trained: bool = False,
    ) -> None:
        self._name, self.session, self._is_last, self._has_trained = name, session, is_last, has_trained
        self._checkpoint = checkpoint
        self.watch = ScriptWatch(name, self._begins)
        self._patches = Patches("finds the models and the optimizers of a script")
        self.watch.evaluates_before = session.evaluates_before
        self.watch.listen(self._patches)
        self._patches.hook(register_optimizer_step_pre_hook, self._before_step)
        self._bare = BareSteps(self._backward_begins)
        self._bare.listen()
        watch_spawning(self.watch, self._patches)
        watch_processes(name, self._patches)
        self._before = BeforeScript.now()
        session.watch_ranks()
        session.pipelines.found = self._stage_begins
        self.watch.trains = session.pipelines.trains
        if checkpoint is None:
            session.watch_building()
        set_checkpoint(checkpoint)

    def _begins(self, model: nn.Module, called: nn.Module, has_optimizer: bool) -> None:
        session, checkpoint = self.session, self._checkpoint
        self._bare.end()
        for each in models_of(model):
            check_model(each)
        if session.state != "waiting":
            if checkpoint is not None:
                raise _trains_later(checkpoint, model)
            session.train_also(model)
            session.first_forward(called)
            return
        trains_copies = self.watch.trains_copies
        session.attach(
            model,
            self.watch.early_optimizers(model),
            is_stepped_by_hand=not has_optimizer,
            trains_copies=trains_copies and not execution_is_transformed(),
        )
        if checkpoint is not None and (execution_is_transformed() or trains_copies):
            # What the model is called with is not its own, and no step of it is seen.
            why = "torch.func computes the gradients" if execution_is_transformed() else "copies are trained"
            _log.warning("no step is committed to %s: %s", checkpoint.directory, why)
            checkpoint = None
        if checkpoint is not None:
            checkpoint.prepare(model)  # before parameters go there
        session.note_evaluated(self.watch.evaluated(model))
        # The hook just attached is not in the list this call is going through: call it for this first time.
        session.first_forward(called)
        if checkpoint is not None:
            checkpoint.plan_in_effect = lambda: None if session.plan is None else session.plan.encode()
            checkpoint.attach(model)

    def _stage_begins(self, module: nn.Module) -> None:
        self.watch.before_forward(module)
        self.watch.after_forward(module)

    def _backward_begins(self) -> None:
        with self.watch.guarded():
            self.session.backward_begins(lambda: not self.watch.has_all_frozen)

    def _before_step(self, optimizer: Any, *_: Any) -> None:
        with self.watch.guarded():
            if self.watch.check_optimizer(optimizer):
                self.session.add_optimizer(optimizer)

    def close(self, status: int) -> None:
        """Takes every hook away, and closes the session.

        Args:
            status: the script's own; 1 where it has none.
        """
        session, checkpoint, watch = self.session, self._checkpoint, self.watch
        self._bare.end()
        self._patches.undo()
        completed = status == 0 and watch.failure is None
        try:
            if completed and session.failure is None:
                session.end_last_step()
            if checkpoint is not None:
                # Before anything comes back into memory, which may have no room for it.
                checkpoint.finish(completed=completed and session.failure is None)
        finally:
            try:
                session.close(completed=completed, brings_back=not self._is_last)
            finally:
                if checkpoint is not None:
                    checkpoint.close(completed=False)
                set_checkpoint(None)

    def check(self, status: int) -> None:
        """Raises what the script was refused for, once it has ended and the run is closed.

        Raises:
            UsageError: the script finished without a training step.
            MemwallError: whatever else ended the session, even where the script caught it.
        """
        session, checkpoint, watch = self.session, self._checkpoint, self.watch
        failure = watch.failure or session.failure or (None if checkpoint is None else checkpoint.failure)
        if failure is not None:
            raise failure
        is_bare = self._bare.num_seen > 0 and num_compiled() == self._before.num_compiled
        is_missed = self._has_trained or watch.has_missed_steps or session.has_missed_steps or is_bare
        is_new = checkpoint is None or checkpoint.is_new
        if session.measured.num_steps == 0 and status == 0 and not is_missed and is_new:
            raise UsageError(without_step(self._name, status, self._before))


def run_script(
    name: str,
    args: Sequence[str],
    session: Session,
    *,
    is_module: bool = False,
    checkpoint: StepCheckpoint | None = None,
    is_last: bool = False,
    num_failures: int = 0,
) -> int:
    """Runs a script, or a module, under a session, which is closed at the end.

    Args:
        checkpoint, is_last: see `ScriptRun`.
        num_failures: how many processes before this one ran out of memory under the same budget.

    Returns:
        The script's own status. Without a step in `session.measured` it trained past memwall.

    Raises:
        UsageError: the script finished without a training step.
        InfeasibleError: the budget cannot be met.
        OutOfMemoryError: memory ran out.
        MemwallError: whatever else ended the session, even where the script caught it.
    """
    run, status = ScriptRun(name, session, checkpoint=checkpoint, is_last=is_last), 1
    try:
        has_budget = session.budget_bytes > 0
        status = execute(name, args, is_module=is_module, explained=session.explained, has_budget=has_budget)
    except OutOfMemoryError as error:
        if checkpoint is not None and session.budget_bytes:
            raise note_failure(
                checkpoint.run_directory,
                session.budget_bytes,
                error,
                num_before=num_failures,
                is_committed=checkpoint.steps_done > 0,
            ) from error
        raise
    finally:
        run.close(status)
    run.check(status)
    return status


def profile_script(name: str, args: Sequence[str], *, num_steps: int, is_module: bool = False) -> Trace:
    """Runs a script until `num_steps` optimizer steps are recorded, then ends it.

    Returns:
        The trace, with the speeds of this machine.

    Raises:
        UsageError: the script ended or failed before its first step was complete.
    """
    profiled = Profile(num_steps)

    def begins(model: nn.Module, called: nn.Module, has_optimizer: bool) -> None:
        for optimizer in watch.early_optimizers(model):
            profiled.add_optimizer(optimizer)
        profiled.begins(model, called, has_optimizer)

    watch = ScriptWatch(name, begins)

    def before_step(optimizer: Any, *_: Any) -> None:
        with watch.guarded():
            if watch.check_optimizer(optimizer):
                profiled.add_optimizer(optimizer)

    patches = Patches("records the steps of a script")
    watch.listen(patches)
    patches.hook(register_optimizer_step_pre_hook, before_step)
    status, before = 0, BeforeScript.now()
    try:
        status = execute(name, args, is_module=is_module)
        if status == 0 and watch.failure is None:
            profiled.borders.end_run()
            profiled.end_step()
    except ScriptEnded:
        pass
    finally:
        patches.undo()
        profiled.close()
    if watch.failure is not None:
        raise watch.failure
    builder = profiled.builder
    if builder is None or profiled.num_recorded == 0:
        raise UsageError(without_step(name, status, before))
    model = builder.roots[0]
    trace = builder.trace(profiled.borders.optimizers, machine=_machine_of(model))
    base_bytes = profiled.base_bytes
    return trace if base_bytes is None else msgspec.structs.replace(trace, base_bytes=base_bytes)


def _trains_later(checkpoint: StepCheckpoint, model: nn.Module) -> UsageError:
    names = ", ".join(type(each).__name__ for each in models_of(model))
    return UsageError(
        f"--checkpoint {checkpoint.directory} commits what is trained from the first step on, and this "
        f"script goes on to train {names}; run it without --checkpoint, and save in the script"
    )


def _machine_of(model: nn.Module) -> Machine:
    """This machine's speeds, with the default disk where there is a fit one: `plan --disk DIR` measures another.

    Of a device that of its link to host memory.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        return machine_above_host(device)
    try:
        return measured_machine(default_directory())
    except StoreError:
        return measured_machine("")
