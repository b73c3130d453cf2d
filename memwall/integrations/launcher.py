"""Runs an unmodified training script under a session: finds its model and optimizer while it runs.

The first module called with gradients on that holds trainable parameters is the model; its optimizers are those that
step. Nothing in the script changes; what memwall hooks is taken away when the script ends.
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
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.offload.parking import machine_above_host, measured_machine
from memwall.checkpoint.resumption import set_checkpoint
from memwall.checkpoint.step_checkpoint import StepCheckpoint
from memwall.errors import MemwallError, OutOfMemoryError, StoreError, UsageError
from memwall.integrations.preflight import check_model
from memwall.machine.disk_location import default_directory
from memwall.machine.meter import meter_of, return_free_memory
from memwall.machine.tiers import Machine
from memwall.observe.history import MemoryHistory
from memwall.patches import Patches
from memwall.session.measurements import standing_bytes
from memwall.session.next_budget import note_failure
from memwall.session.session import Session
from memwall.torch_internals.autograd import current_node
from memwall.trace.optimizers import trains
from memwall.trace.records import Trace
from memwall.trace.trace_builder import TraceBuilder

__all__ = ["ScriptEnded", "profile_script", "run_script"]

_INTERRUPTED = 130  # what a shell shows for a program that Ctrl-C ended: 128 + SIGINT


class ScriptEnded(BaseException):
    """Ends a script early from inside, once enough steps were recorded.

    Not an `Exception`, so that a script which handles those does not go on.
    """


class _Watch:
    """Waits for the model and the optimizers of a script to show themselves, and remembers what memwall refused."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.model: nn.Module | None = None
        self.optimizers: list[torch.optim.Optimizer] = []
        self.failure: MemwallError | None = None

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Goes around each hook: a script that catches memwall's error meets it again, and it decides the status."""
        if self.failure is not None:
            raise self.failure.without_frames()
        try:
            yield
        except MemwallError as error:
            self.failure = error.without_frames()
            raise

    def is_model(self, module: nn.Module) -> bool:
        """Says whether this call is the first one of what is being trained."""
        return (
            torch.is_grad_enabled()
            and current_node() is None
            and any(parameter.requires_grad for parameter in module.parameters())
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer of another model: a session plans the step of one.

        Raises:
            UsageError: it trains none of the model's parameters.
        """
        if self.model is not None and not trains(optimizer, self.model):
            raise UsageError(
                f"{self.script} called {type(self.model).__name__} with gradients on, but its optimizer "
                f"{type(optimizer).__name__} trains other parameters; a script that trains two models cannot be "
                "planned as one: train them in separate scripts, or call the one that is not trained under "
                "torch.no_grad()"
            )
        if optimizer not in self.optimizers:
            self.optimizers.append(optimizer)


def run_script(
    name: str,
    args: Sequence[str],
    session: Session,
    *,
    is_module: bool = False,
    checkpoint: StepCheckpoint | None = None,
    history: MemoryHistory | None = None,
    is_last: bool = False,
) -> int:
    """Runs a script, or a module, under a session, which is closed at the end.

    Args:
        checkpoint: where its steps are committed; closed at the end as well.
        history: what records the device's allocator, begun already; closed at the end as well.
        is_last: the process ends when the script has ended. What is on disk stays there then: the budget may have no
            room for it.

    Returns:
        The script's own status.

    Raises:
        UsageError: the script finished without a training step, or trains two models.
        InfeasibleError: the budget cannot be met.
        OutOfMemoryError: memory ran out.
        MemwallError: whatever else ended the session, even where the script caught it.
    """
    watch = _Watch(name)

    def before_forward(module: nn.Module, _: Any) -> None:
        if watch.model is None and watch.is_model(module):
            with watch.guarded():
                check_model(module)
                session.attach(module, None)
                watch.model = module
                forward_hook.undo()
                if checkpoint is not None:
                    checkpoint.prepare(module)  # before parameters go there
                # The hook just attached is not in the list this call is going through: call it for this first time.
                session.first_forward()
                if history is not None:
                    history.attach(module)
                if checkpoint is not None:
                    checkpoint.plan_in_effect = lambda: None if session.plan is None else session.plan.encode()
                    checkpoint.attach(module)

    def before_step(optimizer: Any, *_: Any) -> None:
        with watch.guarded():
            watch.check_optimizer(optimizer)
            session.add_optimizer(optimizer)

    def failed(error: BaseException) -> None:
        if history is not None:
            history.failed(error, session.trace)

    patches = Patches("finds the model and the optimizer of a script")
    forward_hook = patches.hook(register_module_forward_pre_hook, before_forward)
    patches.hook(register_optimizer_step_pre_hook, before_step)

    def spawned(
        original: Callable[..., Any], fn: Any, args: Any = (), nprocs: int = 1, *rest: Any, **kwargs: Any
    ) -> Any:
        with watch.guarded():
            raise UsageError(_spawning(name, nprocs))

    # What the public function calls, and notebook launchers too.
    patches.wrap(sys.modules["torch.multiprocessing.spawn"], "start_processes", spawned)
    patches.wrap(torch.multiprocessing, "start_processes", spawned)
    status = 1
    if checkpoint is None:
        session.watch_building()
    set_checkpoint(checkpoint)
    try:
        status = _execute(name, args, is_module=is_module, failed=failed, explained=session.explained)
    except OutOfMemoryError as error:
        if checkpoint is not None and session.budget_bytes:
            raise note_failure(checkpoint.directory, session.budget_bytes, error) from error
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
    if session.measured.num_steps == 0 and status == 0 and (checkpoint is None or checkpoint.is_new):
        raise UsageError(_without_step(name, status))
    return status


def profile_script(name: str, args: Sequence[str], *, num_steps: int, is_module: bool = False) -> Trace:
    """Runs a script until `num_steps` optimizer steps are recorded, then ends it.

    Returns:
        The trace, with the speeds of this machine.

    Raises:
        UsageError: the script ended or failed before its first step was complete, or trains two models.
    """
    watch = _Watch(name)
    builder: TraceBuilder | None = None
    num_recorded = 0
    base_bytes: int | None = None

    def before_forward(module: nn.Module, _: Any) -> None:
        nonlocal builder, num_recorded, base_bytes
        with watch.guarded():
            if watch.model is None and watch.is_model(module):
                watch.model = module
                builder = TraceBuilder([module])
            if module is not watch.model or builder is None or not watch.is_model(module):
                return
            if builder.is_recording:
                if builder.num_optimizer_steps == 0:
                    return
                builder.finish_step(watch.optimizers)
                num_recorded += 1
            if num_recorded >= num_steps:
                standing = standing_bytes(module, watch.optimizers, builder.trace(watch.optimizers))
                return_free_memory()
                # After the steps: threads, loaded code and caches of the libraries are part of what every further step
                # finds.
                base_bytes = meter_of(module).base_bytes(standing)
                raise ScriptEnded
            builder.start_step(watch.optimizers, running_root=module)

    def before_step(optimizer: Any, *_: Any) -> None:
        with watch.guarded():
            watch.check_optimizer(optimizer)

    patches = Patches("records the steps of a script")
    patches.hook(register_module_forward_pre_hook, before_forward)
    patches.hook(register_optimizer_step_pre_hook, before_step)
    try:
        status = _execute(name, args, is_module=is_module)
        is_last_whole = builder is not None and builder.is_recording and builder.num_optimizer_steps > 0
        if status == 0 and watch.failure is None and builder is not None and is_last_whole:
            builder.finish_step(watch.optimizers)
            num_recorded += 1
    except ScriptEnded:
        status = 0
    finally:
        patches.undo()
        if builder is not None:
            builder.cancel_step()
    if watch.failure is not None:
        raise watch.failure
    if builder is None or num_recorded == 0:
        raise UsageError(_without_step(name, status))
    model = builder.roots[0]
    trace = builder.trace(watch.optimizers, machine=_machine_of(model))
    return trace if base_bytes is None else msgspec.structs.replace(trace, base_bytes=base_bytes)


def _spawning(name: str, num_processes: int) -> str:
    return (
        f"{name} starts {num_processes} processes by torch.multiprocessing, in which memwall would not be; call what "
        "they run in the script itself, with RANK and WORLD_SIZE from the environment, and start it by memwall run "
        f"--nproc {num_processes} --budget SIZE {name}"
    )


def _without_step(name: str, status: int) -> str:
    ending = f"ended with status {status}" if status else "finished"
    return (
        f"{name} {ending} without a whole training step (forward of a module with gradients on, backward, step of a "
        "torch optimizer); there is nothing to plan"
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
