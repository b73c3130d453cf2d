"""Runs an unmodified training script under a session: finds its models and optimizers while it runs.

The first module called with gradients on that an optimizer trains is a model, and so are those that hold what else the
script's optimizers train (`trained_models`). Nothing in the script changes; what memwall hooks is taken away when the
script ends.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.offload.parking import machine_above_host, measured_machine
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import MemwallError, OutOfMemoryError, StoreError, UsageError
from memwall.integrations.preflight import check_model
from memwall.integrations.scripts.script_profile import Profile, ScriptEnded
from memwall.integrations.scripts.script_watch import ScriptWatch
from memwall.integrations.scripts.spawned import watch_spawning
from memwall.machine.disk_location import default_directory
from memwall.machine.tiers import Machine
from memwall.observe.history import MemoryHistory
from memwall.patches import Patches
from memwall.session.next_budget import note_failure
from memwall.session.session import Session
from memwall.torch_internals.compiler import num_compiled
from memwall.trace.records import Trace
from memwall.trace.together import models_of

__all__ = ["ScriptEnded", "profile_script", "run_script"]

_INTERRUPTED = 130  # what a shell shows for a program that Ctrl-C ended: 128 + SIGINT

_OF_COMPILED = (
    ". If torch.compile was given the function that calls the model, give it the model: memwall plans what calls it"
)


def run_script(
    name: str,
    args: Sequence[str],
    session: Session,
    *,
    is_module: bool = False,
    checkpoint: StepCheckpoint | None = None,
    history: MemoryHistory | None = None,
    is_last: bool = False,
    num_failures: int = 0,
) -> int:
    """Runs a script, or a module, under a session, which is closed at the end.

    Args:
        checkpoint: where its steps are committed; closed at the end as well.
        history: what records the device's allocator, begun already; closed at the end as well.
        is_last: the process ends when the script has ended. What is on disk stays there then: the budget may have no
            room for it.
        num_failures: how many processes before this one ran out of memory under the same budget.

    Returns:
        The script's own status. Without a step in `session.measured` it trained past memwall.

    Raises:
        UsageError: the script finished without a training step.
        InfeasibleError: the budget cannot be met.
        OutOfMemoryError: memory ran out.
        MemwallError: whatever else ended the session, even where the script caught it.
    """

    def begins(model: nn.Module, called: nn.Module, has_optimizer: bool) -> None:
        for each in models_of(model):
            check_model(each)
        if session.state != "waiting":
            if checkpoint is not None:
                raise _trains_later(checkpoint, model)
            session.train_also(model)
            session.first_forward(called)
            return
        session.attach(model, watch.early_optimizers(model), is_stepped_by_hand=not has_optimizer)
        if checkpoint is not None:
            checkpoint.prepare(model)  # before parameters go there
        # The hook just attached is not in the list this call is going through: call it for this first time.
        session.first_forward(called)
        if history is not None:
            history.attach(model)
        if checkpoint is not None:
            checkpoint.plan_in_effect = lambda: None if session.plan is None else session.plan.encode()
            checkpoint.attach(model)

    watch = ScriptWatch(name, begins)

    def before_step(optimizer: Any, *_: Any) -> None:
        with watch.guarded():
            if watch.check_optimizer(optimizer):
                session.add_optimizer(optimizer)

    def failed(error: BaseException) -> None:
        if history is not None:
            history.failed(error, session.trace)

    patches = Patches("finds the models and the optimizers of a script")
    watch.listen(patches)
    patches.hook(register_optimizer_step_pre_hook, before_step)
    watch_spawning(watch, patches)
    status, num_before = 1, num_compiled()
    session.watch_receives()
    if checkpoint is None:
        session.watch_building()
    set_checkpoint(checkpoint)
    try:
        status = _execute(name, args, is_module=is_module, failed=failed, explained=session.explained)
    except OutOfMemoryError as error:
        if checkpoint is not None and session.budget_bytes:
            raise note_failure(
                checkpoint.run_directory, session.budget_bytes, error, num_before=num_failures
            ) from error
        raise
    finally:
        patches.undo()
        completed = status == 0 and watch.failure is None
        if history is not None:
            history.close(completed=completed)
        try:
            if completed and session.failure is None:
                session.end_last_step()
            if checkpoint is not None:
                # Before anything comes back into memory, which may have no room for it.
                checkpoint.finish(completed=completed and session.failure is None)
        finally:
            try:
                session.close(completed=completed, brings_back=not is_last)
            finally:
                if checkpoint is not None:
                    checkpoint.close(completed=False)
                set_checkpoint(None)
    failure = watch.failure or session.failure or (None if checkpoint is None else checkpoint.failure)
    if failure is not None:
        raise failure
    is_missed = watch.has_missed_steps or session.has_missed_steps
    if session.measured.num_steps == 0 and status == 0 and not is_missed and (checkpoint is None or checkpoint.is_new):
        raise UsageError(_without_step(name, status, compiles=num_compiled() > num_before))
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
    status, num_before = 0, num_compiled()
    try:
        status = _execute(name, args, is_module=is_module)
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
        raise UsageError(_without_step(name, status, compiles=num_compiled() > num_before))
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


def _without_step(name: str, status: int, *, compiles: bool) -> str:
    ending = f"ended with status {status}" if status else "finished"
    return (
        f"{name} {ending} without a whole training step (forward of a module with gradients on, backward, step of a "
        f"torch optimizer); there is nothing to plan{_OF_COMPILED if compiles else ''}"
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


def _execute(
    name: str,
    args: Sequence[str],
    *,
    is_module: bool,
    failed: Callable[[BaseException], None] = lambda _: None,
    explained: Callable[[BaseException], MemwallError | None] = lambda _: None,
) -> int:
    """Runs a script as `python name args` would; returns the status it asks for, 1 if it raised.

    Args:
        failed: told what ended the script, before anything is undone.
        explained: what a failure means to memwall; None where it is the script's own.

    Raises:
        MemwallError: one that the script let pass.
        ScriptEnded: likewise.
    """
    with _as_main(name, args, is_module=is_module):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            if end.code is None or isinstance(end.code, int):
                return end.code or 0
            sys.stderr.write(f"{end.code}\n")
            return 1
        except (MemwallError, ScriptEnded) as error:
            failed(error)
            raise
        except (Exception, KeyboardInterrupt) as error:
            failed(error)
            # As Python would show it, from the script's own first line on.
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames)
            found = explained(error)
            if found is not None:
                raise found from error
            return _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    return 0


@contextmanager
def _as_main(name: str, args: Sequence[str], *, is_module: bool) -> Iterator[None]:
    """Sets the argument list and import path that a script finds when Python runs it."""
    argv, path = list(sys.argv), list(sys.path)

    def undo() -> None:
        """Puts both back even where the script has changed them: they were its own."""
        sys.argv, sys.path[:] = argv, path

    with Patches("runs a script as Python would") as patches:
        patches.add("attribute", "sys.argv and sys.path", undo)
        sys.argv = [name, *args]
        sys.path.insert(0, os.getcwd() if is_module else str(Path(name).resolve().parent))
        yield
