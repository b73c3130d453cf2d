"""A Trainer's training steps, handed over to a session so that one that runs out of memory can be done again.

The Trainer shows a callback its model and its optimizer, but neither itself nor an exception. It is found among the
callers of the callback's first event, and two of its methods are wrapped, on this one object.
"""

import copy
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from memwall.apply.session import Session

__all__ = ["TrainerSteps", "trainer_of"]


class _Owner(Protocol):
    session: Session | None

    def close(self, *, completed: bool = True) -> None: ...


def trainer_of(callback: object) -> Any | None:
    """The Trainer that is calling this callback right now; None where that is somebody else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        callbacks = getattr(getattr(found, "callback_handler", None), "callbacks", ())
        if callable(getattr(found, "training_step", None)) and any(each is callback for each in callbacks):
            return found
        frame = frame.f_back
    return None


class TrainerSteps:
    """Wraps `train` of a Trainer, and `training_step` while a session is open; both call what they wrap.

    Args:
        trainer: whose methods are wrapped; it is not kept alive.
        owner: who has the session of the present `train()`.
    """

    def __init__(self, trainer: Any, owner: _Owner) -> None:
        self._trainer, self._owner = weakref.ref(trainer), owner
        self._wrap("train", self._train)

    def hand_over(self) -> None:
        """From now on the session runs the training steps."""
        self._wrap("training_step", self._training_step)

    def take_back(self) -> None:
        """The Trainer runs them itself."""
        trainer = self._trainer()
        if trainer is not None:
            vars(trainer).pop("training_step", None)

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        trainer = self._trainer()
        if trainer is None or name in vars(trainer):
            return  # somebody else has put a method of its own there
        method = getattr(type(trainer), name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return around(method.__get__(self._trainer()), *args, **kwargs)

        setattr(trainer, name, wrapped)

    def _training_step(self, method: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        session = self._owner.session
        if session is None or session.state == "closed":
            return method(model, inputs, *args, **kwargs)
        # A loss may take its labels out of the inputs, which must be there the next time.
        return session.redoable(lambda: method(model, copy.copy(inputs), *args, **kwargs))

    def _train(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Whatever ends training, the model is given back, and a lack of memory is explained."""
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            session = self._owner.session
            explained = None if session is None else session.explained(error)
            self._owner.close(completed=False)
            if explained is not None:
                raise explained from error
            raise
