"""Puts memwall into Lightning's Trainer, by one callback.

Lightning calls `training_step` of its module, not the module, and does so within the optimizer's step, as a closure.
Here `training_step` is called through the module, as Lightning itself does where a strategy wraps it, and the closure
before the optimizer's step, as optimizers do themselves: so the hooks that find a step's parts see them.
"""

import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from memwall.errors import IntegrationError
from memwall.observe.measure import run_report
from memwall.observe.run_report import RunReport
from memwall.patches import Patches
from memwall.planning.planfile import Plan
from memwall.session.fit import open_session
from memwall.session.session import Session
from memwall.units import format_bytes


def _base() -> Any:
    """Returns the base of Lightning's callbacks, of the package of it that the script uses; else object."""
    is_old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    try:
        return import_module(f"{'pytorch_lightning' if is_old else 'lightning.pytorch'}.callbacks").Callback
    except ImportError:
        return object  # said where a callback is made


_log = logging.getLogger(__name__)

_SHARDING = ("DeepSpeed", "FSDP", "ModelParallel")


class LightningCallback(_base()):  # type: ignore[misc]
    """Makes a fit of Lightning's Trainer fit a budget, or follow a plan made before.

    Example::

        from memwall.integrations import LightningCallback

        trainer = lightning.Trainer(max_epochs=1, callbacks=[LightningCallback(budget="10GiB")])
        trainer.fit(module, loader)

    However training ends, the module is given back. What runs out of memory ends in `memwall.OutOfMemoryError`.

    Args:
        budget, plan, disk, no_disk, allow: as `memwall.fit` takes them.
    """

    def __init__(
        self,
        *,
        budget: str | int | None = None,
        plan: Plan | None = None,
        disk: str | None = None,
        no_disk: bool = False,
        allow: Sequence[str] = (),
    ) -> None:
        if LightningCallback.__base__ is object:
            raise ImportError("the callback for Lightning needs it: pip install 'torch-memwall[lightning]'")
        self.session: Session | None = None
        """The session of the present or last `fit`; None before training starts."""
        self._session_on = partial(
            open_session, budget=budget, plan=plan, disk=disk, no_disk=no_disk, allow=tuple(allow)
        )
        self._patches = Patches("calls training_step through its module")

    def close(self, *, completed: bool = True) -> None:
        """Ends the session: the module is as it was. Done by itself when training ends."""
        self._patches.undo()
        if self.session is not None:
            self.session.close(completed=completed)

    def report(self) -> RunReport:
        """Returns forecast and measurement.

        Raises:
            IntegrationError: nothing was trained.
            TraceError: not one whole step ran.
        """
        if self.session is None:
            raise IntegrationError("no trainer.fit() was seen; pass the callback as Trainer(callbacks=[...])")
        return run_report(self.session)

    # -- events ----------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Opens a session on the module and its optimizers, which Lightning has made by now.

        Raises:
            IntegrationError: a strategy shards the module.
            PlanError: the plan was made for another module.
            UsageError: neither or both of budget and plan; a budget that is no size.
        """
        strategy = type(trainer.strategy).__name__
        if strategy.startswith(_SHARDING):
            raise IntegrationError(
                f"{strategy} shards the module, which memwall does not follow under Lightning; take strategy='auto' or "
                "'ddp', or make the strategy's own configuration with `memwall plan`"
            )
        self.close(completed=False)
        self.session = self._session_on(pl_module, trainer.optimizers)
        self._patches.wrap(pl_module, "training_step", partial(_called_through, pl_module))
        for optimizer in trainer.optimizers:
            if not isinstance(optimizer, torch.optim.LBFGS):  # which calls its closure several times
                self._patches.wrap(optimizer, "step", _closure_first)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
        """Makes and applies the plan after the first step, before anything is evaluated or saved.

        Raises:
            InfeasibleError: nothing fits.
        """
        if self.session is not None:
            self.session.end_step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Closes the session and logs one line."""
        self.close()
        session = self.session
        if session is not None and session.plan is not None and trainer.is_global_zero:
            _log.info(
                "%d steps under %d actions; peak %s, budget %s",
                session.measured.num_steps,
                len(session.plan.actions),
                format_bytes(max(session.measured.overall_peak_bytes, session.measured.peak_bytes), rounding="up"),
                format_bytes(session.budget_bytes, rounding="down"),
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Gives the module back.

        Raises:
            OutOfMemoryError: that is what the exception was; this says what to do.
        """
        explained = None if self.session is None else self.session.explained(exception)
        self.close(completed=False)
        if explained is not None:
            raise explained from exception


def _closure_first(step: Callable[..., Any], closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
    """Steps an optimizer with the gradients that its closure has computed; returns the closure's loss."""
    if closure is None:
        return step(**kwargs)
    with torch.enable_grad():
        loss = closure()
    step(**kwargs)
    return loss


def _called_through(module: nn.Module, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a step of the module as its forward, whose place is free again before the step calls that itself."""
    own = vars(module).get("forward")

    def put_back() -> None:
        if own is None:
            vars(module).pop("forward", None)
        else:
            vars(module)["forward"] = own

    def run(*args: Any, **kwargs: Any) -> Any:
        put_back()
        return step(*args, **kwargs)

    vars(module)["forward"] = run
    try:
        return module(*args, **kwargs)
    finally:
        put_back()
