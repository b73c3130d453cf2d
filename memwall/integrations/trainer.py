"""Puts memwall into the Trainer of transformers, by one callback.

What the Trainer fixes before a callback can act (micro-batch, accumulation, precision) stays the Trainer's;
`plan.training_arguments(args)` sets it. The rest of a plan is applied by a session on the model.
"""

import logging
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any, Literal

from torch import nn

from memwall.errors import InfeasibleError, IntegrationError, UsageError
from memwall.integrations.accelerate import arguments_text, set_by_loop, torch_optimizer
from memwall.integrations.preflight import check_arguments
from memwall.integrations.trainer_steps import TrainerSteps, trainer_of
from memwall.logs import tell
from memwall.observe.measure import run_report
from memwall.observe.run_report import RunReport
from memwall.planning.planfile import Plan
from memwall.planning.search import make_plan
from memwall.planning.settings import Settings
from memwall.planning.technique import technique_of
from memwall.session.fit import open_session
from memwall.session.ranks.shared_plan import agreed_excess
from memwall.session.refusals import check_parallel
from memwall.session.session import Session
from memwall.units import format_bytes

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError("the Trainer callback needs transformers: pip install 'torch-memwall[hf]'") from error

_log = logging.getLogger(__name__)


class MemwallCallback(TrainerCallback):  # type: ignore[misc]
    """Makes a Trainer's run fit a budget, or follow a plan made before.

    Example::

        trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[MemwallCallback(budget="10GiB")])
        trainer.train()

    A training step that runs out of memory is done again under a plan that needs less, up to three times in a run;
    what runs out elsewhere ends in `memwall.OutOfMemoryError`. However training ends, the model is given back.

    With `auto_find_batch_size=True` no batch size is tried out: a plan divides batches into the largest micro-batches
    that fit, at the same global batch, where the losses of parts add up to the batch's. With `torch_compile=True` the
    compiled model is planned, and with `model_init` each model that the Trainer trains.

    Args:
        budget, plan, disk, no_disk, allow: as `memwall.fit` takes them.
        on_exceed: what follows where the budget is passed all the same, in training, evaluation or saving (on a CUDA
            device after the first step): "warn" says so and trains on, "stop" ends training after the step, on all
            ranks.

    Raises:
        UsageError: another word for `on_exceed`.
    """

    def __init__(
        self,
        *,
        budget: str | int | None = None,
        plan: Plan | None = None,
        disk: str | None = None,
        no_disk: bool = False,
        allow: Sequence[str] = (),
        on_exceed: Literal["warn", "stop"] = "warn",
    ) -> None:
        if on_exceed not in ("warn", "stop"):
            raise UsageError(f"MemwallCallback(on_exceed={on_exceed!r}): expected 'warn' or 'stop'")
        self._stops = on_exceed == "stop"
        self.session: Session | None = None
        """The session of the present or last `train()`; None before the Trainer is built."""
        self._plan, self._disk, self._allow = plan, disk, tuple(allow)
        self._session_on = partial(
            open_session, budget=budget, plan=plan, disk=disk, no_disk=no_disk, allow=self._allow
        )
        self._model: nn.Module | None = None
        self._steps: TrainerSteps | None = None

    def close(self, *, completed: bool = True) -> None:
        """Ends the session: the model is as it was. Done by itself when training ends."""
        if self._steps is not None:
            self._steps.take_back()
        if self.session is not None:
            self.session.close(completed=completed)

    def report(self) -> RunReport:
        """Returns forecast and measurement.

        Raises:
            IntegrationError: the callback belongs to no Trainer.
            TraceError: not one whole step ran.
        """
        if self.session is None:
            raise IntegrationError("this MemwallCallback belongs to no Trainer; pass it as Trainer(callbacks=[...])")
        return run_report(self.session)

    # -- events ----------------------------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Attaches the session, before the Trainer wraps the model.

        Raises:
            IntegrationError: the arguments and memwall, or the arguments and the plan, do not go together.
            PlanError: the plan was made for another model.
            UsageError: neither or both of budget and plan; a budget that is no size.
        """
        _check_arguments(args)
        check_arguments(args)
        if self._plan is not None:
            _check_plan(self._plan, args)
        self._model = model
        if not args.torch_compile:
            self._open(model)
        trainer = trainer_of(self)
        if trainer is not None:
            self._steps = TrainerSteps(trainer, self, divides=args.auto_find_batch_size)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Tells the session the optimizer; a second `train()` gets a session of its own.

        Raises:
            IntegrationError: the callback came too late, or the model is not the one the Trainer was built with.
        """
        if self._model is None:
            raise IntegrationError(
                "MemwallCallback was added to a Trainer that was already built; its model may be wrapped by now. "
                "Pass it when building: Trainer(..., callbacks=[MemwallCallback(...)])"
            )
        trainer = trainer_of(self)
        if not any(module is self._model for module in model.modules()):
            self.close(completed=False)
            if trainer is None or getattr(trainer, "model_init", None) is None:
                raise IntegrationError(
                    f"the Trainer replaced the {type(self._model).__name__} it was built with by a "
                    f"{type(model).__name__}, though it was given no model_init; memwall follows one model"
                )
            self._model, self.session = model, None
        check_parallel(model)
        called = trainer.model_wrapped if args.torch_compile and trainer is not None else self._model
        if self.session is None or self.session.state != "waiting":
            self.close(completed=False)
            self._open(called)
        assert self.session is not None
        self.session.add_optimizer(torch_optimizer(optimizer))
        if self._steps is not None:
            self._steps.hand_over()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Makes and applies the plan after the first step, before anything is evaluated or saved.

        Later steps end training where the budget was passed and that was asked for.

        Raises:
            InfeasibleError: nothing fits; says which arguments would make it fit, if some do.
        """
        if self.session is None:
            return
        try:
            self.session.end_step()
        except InfeasibleError as error:
            self.close(completed=False)
            raise self._with_arguments(error, args) from error
        if self._stops and self.session.budget_bytes and self.session.measured.has_plan:
            control.should_training_stop = self._is_exceeded(state) or control.should_training_stop

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the session and says in one line what it came to."""
        self.close()
        session = self.session
        if session is not None and session.plan is not None and state.is_world_process_zero:
            measured, forecast = session.measured, session.plan.forecast
            seconds = f"{median(measured.step_seconds):.3f} s" if measured.step_seconds else "not timed"
            budget_bytes = forecast.budget_bytes or 0
            peak_bytes = max(measured.overall_peak_bytes, measured.peak_bytes)
            passed = " (passed)" if budget_bytes and peak_bytes > budget_bytes else ""
            tell(
                f"{measured.num_steps} steps (median {seconds}) under {len(session.plan.actions)} actions; peak "
                f"{format_bytes(peak_bytes, rounding='up')}, foreseen "
                f"{format_bytes(forecast.peak.process_bytes, rounding='up')}, budget "
                f"{format_bytes(budget_bytes, rounding='down')}{passed}"
            )

    def _is_exceeded(self, state: Any) -> bool:
        """Returns whether the run has passed its budget, on any rank: all of them end training, or none does."""
        assert self.session is not None
        peak_bytes, budget_bytes = self.session.measured.overall_peak_bytes, self.session.budget_bytes
        excess_bytes = peak_bytes - budget_bytes
        if self.session.ranks is not None:
            excess_bytes = agreed_excess(self.session.ranks, excess_bytes)
        if excess_bytes <= 0:
            return False
        found = f"{format_bytes(peak_bytes, rounding='up')} were held"
        if peak_bytes <= budget_bytes:
            found = f"another rank held {format_bytes(excess_bytes, rounding='up')} more than its budget"
        tell(
            f"training ends after step {state.global_step}: {found}, the budget is "
            f"{format_bytes(budget_bytes, rounding='down')}, and on_exceed='stop'"
        )
        return True

    def _open(self, model: nn.Module) -> None:
        self.session = self._session_on(model, None, set_by_loop=set_by_loop() if self._plan is not None else ())

    def _with_arguments(self, error: InfeasibleError, args: Any) -> InfeasibleError:
        """Returns the same error; where smaller micro-batches would fit, with the arguments that say so.

        A trainer may make several rows of a sample, as TRL's DPOTrainer makes two, an answer to train and one to avoid.
        """
        trace = self.session.trace if self.session is not None else None
        settings = Settings(
            budget_bytes=error.budget_bytes, disk=self._disk, allow=self._allow, allow_accumulation=True
        )
        if trace is None:
            return error
        try:
            plan = make_plan(trace, settings)
        except InfeasibleError:
            return error
        micro_batch, num_micro_batches = plan.batch_parts
        if (micro_batch, num_micro_batches) == (plan.micro_batch, plan.num_micro_batches):
            return error
        rows_of_sample = max(1, trace.micro_batch // args.per_device_train_batch_size)
        if micro_batch < rows_of_sample:
            return error
        help_line = (
            f"set TrainingArguments(per_device_train_batch_size={micro_batch // rows_of_sample}, "
            f"gradient_accumulation_steps={num_micro_batches}): the same global batch, and it fits"
        )
        return InfeasibleError(
            f"{error}\n  - {help_line}",
            budget_bytes=error.budget_bytes,
            smallest_feasible_bytes=error.smallest_feasible_bytes,
            relaxations=(help_line, *error.relaxations),
            not_modelled=error.not_modelled,
        )


def _check_arguments(args: Any) -> None:
    """Refuses what would train behind memwall's back."""
    if args.n_gpu > 1:
        raise IntegrationError(
            f"one process drives {args.n_gpu} devices (DataParallel), memwall plans one device per process; "
            f"start it with torchrun --nproc-per-node {args.n_gpu}"
        )


def _check_plan(plan: Plan, args: Any) -> None:
    """Refuses arguments that are not the plan's: when a callback hears of them it is too late to change them."""
    expected: dict[str, Any] = {}
    for action in plan.actions:
        found = technique_of(action).training_arguments(action)
        expected |= {name: value for name, value in found.items() if value is not False}
    given = {name: getattr(args, name) for name in expected}
    if given != expected:
        raise IntegrationError(
            f"the plan needs TrainingArguments({arguments_text(expected)}), found {arguments_text(given)}; "
            "args = plan.training_arguments(args) sets them"
        )
    if args.per_device_train_batch_size > plan.micro_batch > 0:
        _log.warning(
            "the plan was made for micro-batches of %d samples, per_device_train_batch_size is %d: "
            "its forecast does not hold; make a plan for this batch",
            plan.micro_batch,
            args.per_device_train_batch_size,
        )
