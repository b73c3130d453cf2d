"""Hands a Trainer's training steps over to a session, so that one that runs out of memory can be done again.

The Trainer shows a callback its model and its optimizer, but neither itself nor an exception. It is found among the
callers of the callback's first event, and two of its methods are overridden, for this one object.
"""

import copy
import dis
import inspect
import logging
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Protocol

from memwall.apply.microbatch import num_samples
from memwall.patches import Patches
from memwall.session.session import Session

_log = logging.getLogger(__name__)

_COUNT = "num_items_in_batch"
_LASTS = "a second train() of this Trainer is followed as well; it ends with the Trainer"


class _Owner(Protocol):
    session: Session | None

    def close(self, *, completed: bool = True) -> None: ...


def trainer_of(callback: object) -> Any | None:
    """Returns the Trainer that is calling this callback right now; None where that is somebody else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        callbacks = getattr(getattr(found, "callback_handler", None), "callbacks", ())
        if callable(getattr(found, "training_step", None)) and any(each is callback for each in callbacks):
            return found
        frame = frame.f_back
    return None


class TrainerSteps:
    """Goes around `train` of a Trainer, and around `training_step` while a session runs the steps.

    The Trainer's class becomes a subclass of itself, of the same name. A function put on the object would have to
    hold it: strongly, a cycle keeps the model until the garbage collector comes; weakly, it is gone already in
    `Trainer(...).train()`, where nobody else holds it.

    Args:
        trainer: whose class is changed.
        owner: who has the session of the present `train()`.
        divides: whether a plan may divide the Trainer's batches.
    """

    def __init__(self, trainer: Any, owner: _Owner, *, divides: bool = False) -> None:
        self._owner, self._is_running_steps, self._divides = owner, False, divides
        kind = type(trainer)
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        trainer._memwall_steps = self
        self._patches = Patches("hands training steps over to a session")
        self._patches.replace(trainer, "__class__", type(kind.__name__, (_Watched, kind), named), permanent=_LASTS)

    def hand_over(self) -> None:
        """Lets the session run the training steps from now on."""
        self._is_running_steps = True

    def take_back(self) -> None:
        """Lets the Trainer run them itself."""
        self._is_running_steps = False

    def training_step(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs a step of the Trainer's by the session."""
        session = self._owner.session
        if not self._is_running_steps or session is None or session.state == "closed":
            return method(model, inputs, *args, **kwargs)
        if self._divides:
            is_counted = any(given is not None for given in (*args[:1], kwargs.get(_COUNT)))
            reason = "" if is_counted else f"{type(model).__name__} is not told how many labels a whole batch has"
            reason = reason or _own_mean(method.__self__)  # type: ignore[attr-defined]
            if reason:
                self._divides = False
                _log.warning(
                    "auto_find_batch_size: %s, so that the losses of its parts cannot be added up, and plans do not "
                    "divide batches; set per_device_train_batch_size and gradient_accumulation_steps where the budget "
                    "is too small",
                    reason,
                )
        divided = session if self._divides else None

        def step() -> Any:
            # A loss may take its labels out of the inputs, which must be there the next time.
            if divided is None:
                return method(model, copy.copy(inputs), *args, **kwargs)
            # Each part's loss is a sum over its labels, divided by the number of those of the whole batch.
            parts = divided.step(inputs, count=num_samples)
            return sum(method(model, copy.copy(part), *args, **kwargs) for part in parts)

        return session.redoable(step, inputs)

    def logged(self) -> dict[str, float]:
        """Returns what the Trainer logs beside its own figures: what the last step needed, and may need."""
        session = self._owner.session
        if session is None or session.state != "running" or session.plan is None:
            return {}
        figures = {
            "memwall/peak_bytes": session.measured.last_peak_bytes,
            "memwall/budget_bytes": session.budget_bytes,
            "memwall/forecast_bytes": session.plan.forecast.steady_process_bytes,
        }
        seconds = session.measured.step_seconds
        return figures | ({"memwall/step_seconds": seconds[-1]} if seconds else {})

    def train(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Gives the model back whatever ends training, and explains a lack of memory."""
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            session = self._owner.session
            explained = None if session is None else session.explained(error)
            self._owner.close(completed=False)
            if explained is not None:
                raise explained from error
            raise


def _own_mean(trainer: Any) -> str:
    """Says why the losses of a batch's parts may not add up to the batch's; "" where they do.

    A trainer may say itself that its loss is a mean (`loss_is_scaled_for_ga`), as TRL's DPOTrainer does; another one
    may compute a loss of its own without the number of labels that it is given.
    """
    kind = type(trainer).__name__
    if getattr(trainer, "loss_is_scaled_for_ga", None) is False:
        return f"{kind} takes the mean over the samples of each batch"
    smoother = getattr(trainer, "label_smoother", None)
    if smoother is not None and _COUNT not in inspect.signature(smoother).parameters:
        return f"label smoothing of this transformers takes no {_COUNT}"
    code = getattr(trainer.compute_loss, "__code__", None)
    if code is None:
        return ""
    counts = {_COUNT}
    if code.co_flags & inspect.CO_VARKEYWORDS:
        place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        counts.add(code.co_varnames[place])
    return "" if counts & _names_read(code) else f"{kind}.compute_loss does not use {_COUNT}"


def _names_read(code: CodeType) -> set[str]:
    """Returns the names whose values a function's own code takes, be it to hand them on."""
    read: set[str] = set()
    for each in dis.get_instructions(code):
        if "LOAD_" in each.opname and each.opname != "LOAD_CONST":
            # From Python 3.13 on an instruction may name two variables; of STORE_FAST_LOAD_FAST the second is read.
            names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
            read.update(names[1:] if each.opname.startswith("STORE_") else names)
    return read


class _Watched:
    """Comes before the Trainer's own class."""

    _memwall_steps: TrainerSteps

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return self._memwall_steps.train(super().train, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._memwall_steps.training_step(super().training_step, *args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs:  # and no result of train() or evaluate(), which their callers get
            logs.update(self._memwall_steps.logged())
        return super().log(logs, *args, **kwargs)  # type: ignore[misc]
