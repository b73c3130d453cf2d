"""Runs an unmodified training script under a session: finds its model and optimizer while it runs.

The first module called with gradients on that holds trainable parameters is the model; the optimizer is the one that
steps. Nothing in the script changes; what memwall hooks is taken away when the script ends.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.session import Session
from memwall.errors import UsageError
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


def run_script(
    script: str,
    args: Sequence[str],
    session: Session,
) -> int:
    """Runs a script, or `-m module`, under a session.

    Returns:
        The script's own status.

    Raises:
        UsageError: the script finished without a training step, or trains two models.
        InfeasibleError: the budget cannot be met.
    """
    watch = _Watch(script)

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
            status = _execute(script, args)
    finally:
        handle.remove()
        step_handle.remove()
    if session.measured.num_steps == 0 and status == 0:
        raise UsageError(
            f"{script} finished without an optimizer step on a model called with gradients on; "
            "there was nothing to plan"
        )
    return status


def profile_script(script: str, args: Sequence[str], *, num_steps: int) -> Trace:
    """Runs a script until `num_steps` optimizer steps are recorded, then ends it.

    Raises:
        UsageError: the script ended by itself before that many steps, failed, or trains two models.
    """
    watch = _Watch(script)
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
        status = _execute(script, args)
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
        raise UsageError(f"{script} {ending} without a whole training step (forward, backward, optimizer step)")
    return builder.trace(watch.optimizer)


def _execute(script: str, args: Sequence[str]) -> int:
    """Runs a script as `python script args` would; returns the status it asks for."""
    with _as_main(script, args) as (name, is_module):
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            if end.code is None:
                return 0
            if isinstance(end.code, int):
                return end.code
            print(end.code, file=sys.stderr)
            return 1
    return 0


@contextmanager
def _as_main(script: str, args: Sequence[str]) -> Iterator[tuple[str, bool]]:
    is_module = script == "-m"
    if is_module and not args:
        raise UsageError("-m needs the name of a module")
    argv, path = list(sys.argv), list(sys.path)
    if is_module:
        name = args[0]
        sys.argv = list(args)
        sys.path.insert(0, os.getcwd())
    else:
        if not Path(script).is_file():
            raise UsageError(f"there is no script {script}; give the path of a Python file, or -m MODULE")
        name = script
        sys.argv = [script, *args]
        sys.path.insert(0, str(Path(script).resolve().parent))
    try:
        yield name, is_module
    finally:
        sys.argv, sys.path[:] = argv, path
