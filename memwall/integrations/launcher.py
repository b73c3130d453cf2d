"""Runs an unmodified training script under a session: finds its model and optimizer while it runs.

The first module called with gradients on that holds trainable parameters is the model; the optimizer is the one that
steps. Nothing in the script changes; what memwall hooks is taken away when the script ends.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.session import Session
from memwall.errors import MemwallError, UsageError
from memwall.trace.record import TraceBuilder
from memwall.trace.records import Trace

__all__ = ["ScriptEnded", "profile_script", "run_script"]


class ScriptEnded(Exception):
    """Raised inside a script to end it early, once enough steps were recorded. Not an error."""


class _Watch:
    """Waits for the model and the optimizer of a script to show themselves."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    def is_model(self, module: nn.Module) -> bool:
        """Whether this call is the first one of what is being trained."""
        return (
            torch.is_grad_enabled()
            and torch._C._current_autograd_node() is None  # type: ignore[attr-defined]
            and any(parameter.requires_grad for parameter in module.parameters())
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses a second optimizer: a session plans the step of one model with one optimizer.

        Raises:
            UsageError: another optimizer steps, or the optimizer trains none of the model's parameters.
        """
        if self.optimizer is not None and self.optimizer is not optimizer:
            raise UsageError(
                f"{self.script} steps two models or two optimizers ({type(self.optimizer).__name__} and "
                f"{type(optimizer).__name__}); memwall plans one model with one optimizer: train them in separate "
                "scripts, or put the parameters into groups of one optimizer"
            )
        if self.model is not None:
            trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if not any(id(p) in trained for p in self.model.parameters()):
                raise UsageError(
                    f"{self.script} called {type(self.model).__name__} with gradients on, but its optimizer "
                    f"{type(optimizer).__name__} trains other parameters; a script that trains two models cannot be "
                    "planned as one"
                )
        self.optimizer = optimizer


def run_script(name: str, args: Sequence[str], session: Session, *, is_module: bool = False) -> int:
    """Runs a script, or a module, under a session.

    Returns:
        The script's own status.

    Raises:
        UsageError: the script finished without a training step, or trains two models.
        InfeasibleError: the budget cannot be met.
    """
    watch = _Watch(name)

    def before_forward(module: nn.Module, _: Any) -> None:
        if watch.model is None and watch.is_model(module):
            watch.model = module
            handle.remove()
            session.attach(module, None)
            # The hook just attached is not in the list this call is going through: call it for this first time.
            session.first_forward(module)

    def before_step(optimizer: Any, *_: Any) -> None:
        watch.check_optimizer(optimizer)
        session.set_optimizer(optimizer)

    handle = register_module_forward_pre_hook(before_forward)
    step_handle = register_optimizer_step_pre_hook(before_step)
    try:
        with session:
            status = _execute(name, args, is_module=is_module)
    finally:
        handle.remove()
        step_handle.remove()
    if session.measured.num_steps == 0 and status == 0:
        raise UsageError(
            f"{name} finished without an optimizer step on a model called with gradients on; "
            "there was nothing to plan"
        )
    return status


def profile_script(name: str, args: Sequence[str], *, num_steps: int, is_module: bool = False) -> Trace:
    """Runs a script until `num_steps` optimizer steps are recorded, then ends it.

    Raises:
        UsageError: the script ended by itself before that many steps, failed, or trains two models.
    """
    watch = _Watch(name)
    builder: TraceBuilder | None = None
    num_recorded = 0

    def before_forward(module: nn.Module, _: Any) -> None:
        nonlocal builder, num_recorded
        if watch.model is None and watch.is_model(module):
            watch.model = module
            builder = TraceBuilder([module])
        if module is not watch.model or builder is None or not watch.is_model(module):
            return
        if builder.is_recording:
            if builder.num_optimizer_steps == 0:
                return
            builder.finish_step(watch.optimizer)
            num_recorded += 1
            if num_recorded >= num_steps:
                raise ScriptEnded
        builder.start_step(watch.optimizer, running_root=module)

    def before_step(optimizer: Any, *_: Any) -> None:
        watch.check_optimizer(optimizer)

    handles = [register_module_forward_pre_hook(before_forward), register_optimizer_step_pre_hook(before_step)]
    try:
        status = _execute(name, args, is_module=is_module)
        if builder is not None and builder.is_recording and builder.num_optimizer_steps > 0:
            builder.finish_step(watch.optimizer)
            num_recorded += 1
    except ScriptEnded:
        status = 0
    finally:
        for handle in handles:
            handle.remove()
        if builder is not None:
            builder.cancel_step()
    if builder is None or num_recorded == 0:
        ending = f"ended with status {status}" if status else "finished"
        raise UsageError(f"{name} {ending} without a whole training step (forward, backward, optimizer step)")
    return builder.trace(watch.optimizer)


def _execute(name: str, args: Sequence[str], *, is_module: bool) -> int:
    """Runs a script as `python name args` would; returns the status it asks for, 1 if it raised."""
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
        except (MemwallError, ScriptEnded):
            raise
        except Exception as error:
            # As Python would show it, from the script's own first line on.
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
                frames = frames.tb_next
            traceback.print_exception(type(error), error, frames)
            return 1
    return 0


@contextmanager
def _as_main(name: str, args: Sequence[str], *, is_module: bool) -> Iterator[None]:
    """The argument list and import path that a script finds when Python runs it."""
    argv, path = list(sys.argv), list(sys.path)
    sys.argv = [name, *args]
    sys.path.insert(0, os.getcwd() if is_module else str(Path(name).resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
