"""Runs memwall in a loop of Accelerate's: a session on what `Accelerator.prepare` returns.

Of a plan, Accelerate carries out precision and accumulation (`Accelerator(**plan.accelerate_kwargs())`); everything
else is the session's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from memwall.errors import IntegrationError
from memwall.integrations.preflight import check_accelerator, check_model
from memwall.observe.measure import run_report
from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan
from memwall.planning.technique import technique_of, techniques
from memwall.session.fit import open_session
from memwall.session.session import Session


class MemwallPlugin:
    """Makes a training loop of Accelerate's fit a budget, or follow a plan made before.

    Example::

        with MemwallPlugin(budget="10GiB") as plugin:
            model, optimizer, loader = plugin.prepare(accelerator, model, optimizer, loader)
            for batch in loader:
                ...  # the loop as it was

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
        self.session: Session | None = None
        self._accelerator: Any = None
        self._plan = plan
        self._session_on = partial(
            open_session, budget=budget, plan=plan, disk=disk, no_disk=no_disk, allow=tuple(allow)
        )

    def prepare(self, accelerator: Any, *parts: Any) -> Any:
        """Returns what `accelerator.prepare(*parts)` does, with a session on the model among the parts.

        The parts, one model, its optimizers and whatever else, come in any order.

        Raises:
            IntegrationError: the accelerator or the data loader is not what the plan needs, the model is wrapped in a
                way that fails, there is not one model or no optimizer, or this plugin trains a model already.
            PlanError: the plan was made for another model.
        """
        if self.session is not None and self.session.state != "closed":
            raise IntegrationError("this MemwallPlugin already trains a model; close it, or use one plugin for each")
        check_accelerator(accelerator)
        place = _place_of_model(parts)
        if self._plan is not None:
            _check(self._plan, accelerator, parts)
        prepared = accelerator.prepare(*parts)
        self._accelerator = accelerator
        # A wrapper (DDP) calls the module within it, whose paths are those of the plan and whose hooks it runs.
        check_model(prepared[place])
        trained = accelerator.unwrap_model(prepared[place])
        optimizers = [torch_optimizer(part) for part in prepared if isinstance(part, torch.optim.Optimizer)]
        self.session = self._session_on(
            trained, optimizers, set_by_loop=set_by_loop() if self._plan is not None else ()
        )
        return prepared

    def compute_gradients(self, loss_of: Callable[[], Tensor]) -> Tensor:
        """Runs forward, and backward by the accelerator, of one batch; where memory runs out, see `Session.redoable`.

        Example::

            for batch in loader:
                with accelerator.accumulate(model):
                    plugin.compute_gradients(lambda: loss_function(model(batch["input"]), batch["label"]))
                    optimizer.step()
                    optimizer.zero_grad()

        Args:
            loss_of: computes the loss; it may be called several times.

        Raises:
            IntegrationError: nothing was prepared.
            OutOfMemoryError: memory ran out, and the step cannot be done again.
        """
        if self.session is None or self._accelerator is None:
            raise IntegrationError("plugin.prepare(accelerator, model, optimizer) was not called; nothing can run")
        accelerator = self._accelerator

        def part() -> Tensor:
            loss = loss_of()
            accelerator.backward(loss)
            return loss.detach()

        return self.session.redoable(part)

    def close(self, *, completed: bool = True) -> None:
        """Ends the session: the model is as Accelerate prepared it."""
        if self.session is not None:
            self.session.close(completed=completed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, frames: Any) -> None:
        explained = None if error is None or self.session is None else self.session.explained(error)
        self.close(completed=error is None)
        if explained is not None:
            raise explained from error

    def report(self) -> RunReport:
        """Returns forecast and measurement.

        Raises:
            IntegrationError: nothing was prepared.
            TraceError: not one whole step ran.
        """
        if self.session is None:
            raise IntegrationError("plugin.prepare(accelerator, model, optimizer) was not called; nothing ran")
        return run_report(self.session)


def set_by_loop() -> tuple[str, ...]:
    """Returns the tags of actions that loops of Accelerate's, and the Trainer's, carry out of a plan they are given."""
    return tuple(technique.tag for technique in techniques() if technique.is_set_by_loop)


def _place_of_model(parts: Sequence[Any]) -> int:
    """Returns the number of the part that is a model."""
    models = [place for place, part in enumerate(parts) if isinstance(part, nn.Module)]
    has_optimizer = any(isinstance(part, torch.optim.Optimizer) for part in parts)
    if len(models) == 1 and has_optimizer:
        return models[0]
    found = ", ".join(type(part).__name__ for part in parts) or "nothing"
    raise IntegrationError(
        f"plugin.prepare(accelerator, ...) was given {found}; expected one model and what optimizes it, in any order. "
        "Prepare a further model, one that is not trained say, by accelerator.prepare"
    )


def torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Returns the optimizer of torch within Accelerate's wrapper: the one whose step runs the hooks.

    Raises:
        IntegrationError: there is none in it.
    """
    inner = optimizer
    while hasattr(inner, "optimizer"):
        inner = inner.optimizer
    if not isinstance(inner, torch.optim.Optimizer):
        raise IntegrationError(
            f"the optimizer is a {type(inner).__name__}, expected a torch.optim.Optimizer, whose steps memwall follows"
        )
    return inner


def _check(plan: Plan, accelerator: Any, rest: Iterable[Any]) -> None:
    """Refuses an accelerator that does not do its part of the plan."""
    expected: dict[str, Any] = {}
    for action in plan.actions:
        expected |= technique_of(action).accelerate_kwargs(action)
    found = {name: getattr(accelerator, name) for name in expected}
    if found != expected:
        raise IntegrationError(
            f"the plan needs Accelerator({arguments_text(expected)}), found {arguments_text(found)}; "
            "Accelerator(**plan.accelerate_kwargs()) sets them"
        )
    each = plan.accelerate_kwargs().get("gradient_accumulation_plugin")
    if each is not None and not accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"):
        raise IntegrationError(
            "the plan has FSDP2 reduce the gradients of each micro-batch, which by default wait, whole, for the last "
            "one; Accelerator(**plan.accelerate_kwargs()) has a GradientAccumulationPlugin with sync_each_batch=True"
        )
    sizes = sorted({loader.batch_size for loader in rest if isinstance(loader, DataLoader) and loader.batch_size})
    split = [parts for action in plan.actions if (parts := technique_of(action).batch_parts(action)) is not None]
    for micro_batch, num_micro_batches in split:
        if sizes and micro_batch not in sizes:
            raise IntegrationError(
                f"the plan runs micro-batches of {micro_batch} samples, {num_micro_batches} per step; "
                f"found data loaders with batch_size {', '.join(map(str, sizes))}; set batch_size={micro_batch}"
            )


def arguments_text(values: Mapping[str, Any]) -> str:
    """Returns keyword arguments as they are written in a call."""
    return ", ".join(f"{name}={value!r}" for name, value in values.items())
