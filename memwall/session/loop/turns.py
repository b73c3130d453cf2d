"""Says where a step ends in which several models have their turns.

A step of one model is over when an optimizer has stepped. Of several, as of a GAN, it goes on until each that was
called with gradients on has been stepped, and takes in one that was not called yet. What steps more rarely than that,
as a generator once for several steps of its critic, shows itself later: then steps are recorded until it has its turn.
"""

from collections.abc import Sequence

import torch
from torch import nn

from memwall.trace.optimizers import trains

_MOST_TURNS = 8
"""Steps of one optimizer after which one that has not stepped is not waited for any more."""

_MOST_PARTIAL_STEPS = 5
"""Recorded steps in which not all models have their turns: a Wasserstein GAN's critic has so many of its own."""


class Turns:
    """Counts the turns of models within a step.

    Args:
        models: those that are trained together; of one alone a step is over with any optimizer's step.
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models_of: dict[int, set[int]] = {}
        for model in models:
            for parameter in model.parameters():
                self._models_of.setdefault(id(parameter), set()).add(id(model))
        self._all = {id(model) for model in models}
        self._called: set[int] = set()
        self._stepped: set[int] = set()
        self._counts: dict[int, int] = {}
        self._joined: set[int] = set()
        """Models called once a further one had joined a step in which another one was stepped already."""
        self._awaited: set[int] = set()
        self._idle: set[int] = set()

    def begin(self, model: nn.Module) -> None:
        """Begins a step with the call of a model."""
        self._called, self._stepped, self._counts, self._joined = {id(model)}, set(), {}, set()

    def take_over(self, before: "Turns") -> None:
        """Goes on with the step of other models, as far as these are among them."""
        self._called = before._called & self._all
        self._stepped = before._stepped & self._all

    def called(self, model: nn.Module) -> None:
        """Notes that a model is called with gradients on."""
        if self._joined or self.goes_on_with(model):
            self._joined.add(id(model))
        self._called.add(id(model))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that an optimizer has stepped."""
        self._counts[id(optimizer)] = self._counts.get(id(optimizer), 0) + 1
        if len(self._all) == 1:
            self._stepped |= self._all
            return
        ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models: set[int] = set().union(*(self._models_of.get(each, ()) for each in ids))
        self._stepped |= models or self._all  # an optimizer may hold its own copies, as DeepSpeed's do
        self._idle -= self._stepped
        if max(self._counts.values()) >= _MOST_TURNS:
            self._idle |= (self._called | self._awaited) - self._stepped
            self._awaited -= self._idle

    @property
    def called_models(self) -> frozenset[int]:
        """Returns the models, by their id, that were called with gradients on in the present step."""
        return frozenset(self._called)

    @property
    def num_to_come(self) -> int:
        """Counts the models that were not called in it: their turns are other steps."""
        return len(self._all - self._called)

    @property
    def num_optimizers(self) -> int:
        """Counts the optimizers that have stepped in the present step."""
        return len(self._counts)

    def stepped_by_hand(self) -> None:
        """Notes that the loop has changed parameters itself."""
        self._stepped |= self._all

    @property
    def are_over(self) -> bool:
        """Tells whether each model that was called, or is waited for, has been stepped."""
        return bool(self._stepped) and (self._called | self._awaited) - self._idle <= self._stepped

    def goes_on_with(self, model: nn.Module) -> bool:
        """Tells whether the call of a model belongs to the step, although all that was called has been stepped."""
        return bool(self._stepped) and id(model) not in self._called

    def await_all(self) -> None:
        """Has the steps that follow wait for what was called together in this one, and has been stepped.

        A model that is trained after another one calls itself alone: that other one has had its last turn.
        """
        self._awaited |= self._joined & self._stepped


class FirstTurns:
    """Tells of recorded steps whether one was whole: a plan of some of the models holds for the others' turns not."""

    def __init__(self) -> None:
        self._num_partial = 0

    def are_whole(self, models: Sequence[nn.Module], stepped: Sequence[torch.optim.Optimizer]) -> bool:
        """Returns whether a plan is to be made from the step that was recorded last.

        The one in which the last model joins began with another one's turn, and only the next is whole.

        Args:
            models: those that are trained together.
            stepped: the optimizers that have stepped so far.
        """
        is_partial = not all(any(trains(one, model) for one in stepped) for model in models)
        is_first = self._num_partial == 0
        self._num_partial = self._num_partial + 1 if is_partial else 0
        if self._num_partial == _MOST_PARTIAL_STEPS:
            self._num_partial = 0
            return True
        return is_first and not is_partial
