"""Stages of a pipeline (torch.distributed.pipelining): a rank's step begins with its schedule's, not with a forward.

A later stage has no forward before the earlier ones have had theirs, and ranks that met there would wait for each other
for ever. Every rank calls its schedule, and what ranks agree on is agreed before that waits for another rank's data.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from memwall.errors import UsageError
from memwall.patches import Patches
from memwall.session.step_borders import StepBorders
from memwall.torch_internals.pipelines import (
    around_trials,
    computes_gradients,
    let_go,
    modules_of,
    splits_backward,
    when_schedules_are_known,
)
from memwall.trace.together import models_of


class Pipelines:
    """Follows the schedules of a process, from `listen` on.

    Args:
        borders: hears of the steps that begin with them.
        unseen: is entered while a schedule tries its stages out, in passes that no further step has.

    Attributes:
        found: is called with each module whose step begins, where models are still to be found.
    """

    def __init__(self, borders: StepBorders, unseen: Callable[[], AbstractContextManager[None]]) -> None:
        self._borders, self._unseen = borders, unseen
        self.found: Callable[[nn.Module], None] = lambda _: None

    def listen(self, patches: Patches) -> None:
        """Hears of every schedule that runs from now on."""
        when_schedules_are_known(patches, lambda kind: patches.wrap(kind, "step", self._step))
        around_trials(patches, self._trial)

    def trains(self) -> bool:
        """Returns whether a forward that is called now is one of training: gradients alone do not say so."""
        return self._borders.trains

    def _step(self, original: Callable[..., Any], schedule: Any, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if computes_gradients(schedule) else self._borders.while_within("evaluation"):
            if self.trains():
                _check(schedule)
                let_go(schedule)
                self._begin(modules_of(schedule))
            return original(schedule, *args, **kwargs)

    def _begin(self, modules: list[nn.Module]) -> None:
        """Begins a step with all that ranks agree on; a further schedule of a step that has begun begins none."""
        borders = self._borders
        with borders.while_within("beginning"):
            for module in modules:
                self.found(module)
            if borders.model is None or borders.in_step:
                return
            own = [model for model in models_of(borders.model) if not set(model.modules()).isdisjoint(modules)]
            if own:
                borders.enter_forward(own[0])

    def _trial(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._borders.while_within("trial"), self._unseen():
            return original(*args, **kwargs)


def _check(schedule: Any) -> None:
    """Refuses a schedule whose stages no plan can be made for, on all ranks alike: they have the same one."""
    if splits_backward(schedule):
        raise UsageError(
            f"{type(schedule).__name__} computes the gradients of weights apart from those of inputs, by a second "
            "backward through what is saved, which no plan makes smaller; take Schedule1F1B or "
            "ScheduleInterleaved1F1B, or train this one without memwall"
        )
