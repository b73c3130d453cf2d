"""Tells whether the step that begins is another one than the plan was made from, which is to be recorded, and why."""

from collections.abc import Collection, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, is_not
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from memwall.session.live_plan import LivePlan, Revision
from memwall.session.loop.longer_batch import Shape, is_tight, is_too_large
from memwall.session.loop.smaller_forwards import SmallerForwards
from memwall.session.loop.stages import Stages
from memwall.session.recovery import Recovery
from memwall.session.step_borders import StepBorders
from memwall.torch_internals.autograd import version_of
from memwall.torch_internals.dispatch import without_subclass_functions
from memwall.torch_internals.modules import own_modules, own_parameters
from memwall.trace.together import models_of
from memwall.units import format_bytes

_T = TypeVar("_T")

_takes_gradients, _gradient = attrgetter("requires_grad"), attrgetter("grad")
_is_there = partial(is_not, None)
_UNKNOWN = -1, -1


class Layers:
    """Holds the modules of a model, and finds them anew once one was added, taken away, or put in another's place."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._find()

    def trained(self) -> tuple[bool, ...]:
        """Returns of each parameter whether it takes gradients, as often as modules have it."""
        if any(self._leaves) or any(self._bare) or _values(self._modules) != self._found:
            self._find()
        with without_subclass_functions():  # to look at parameters on disk does not bring them in
            return tuple(map(_takes_gradients, filter(_is_there, _values(self._parameters))))

    def first_gradient(self) -> tuple[int, int] | None:
        """Tells the first gradient that is there, and how often it was changed, so that a backward shows; or None."""
        with without_subclass_functions():
            found = next(filter(_is_there, map(_gradient, filter(_is_there, _values(self._parameters)))), None)
        return None if found is None else (id(found), version_of(found))

    @property
    def device(self) -> torch.device:
        """Returns where the first parameter is; the CPU without one."""
        for own in self._parameters:
            for one in own.values():
                if one is not None:
                    return one.device
        return torch.device("cpu")

    def _find(self) -> None:
        modules = list(self.model.modules())
        # Most modules have parameters or modules of their own, not both: what is empty is asked for that alone.
        self._parameters, self._bare = _told_apart(own_parameters(module) for module in modules)
        self._modules, self._leaves = _told_apart(own_modules(module) for module in modules)
        self._found = _values(self._modules)


def _told_apart(dicts: Iterable[dict[str, _T]]) -> tuple[list[dict[str, _T]], list[dict[str, _T]]]:
    """Returns those that have something, and those that are empty."""
    full: list[dict[str, _T]] = []
    empty: list[dict[str, _T]] = []
    for each in dicts:
        (full if each else empty).append(each)
    return full, empty


def _values(dicts: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


def _standing_bytes(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Returns the bytes of a model's parameters and gradients, and of its optimizers' state."""
    with without_subclass_functions():
        parameters = list(model.parameters())
        states = (each.state[one] for each in optimizers for one in parameters if one in each.state)
        values = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        num_copies = 1 + any(one.grad is not None for one in parameters)
        return sum(value.nbytes for value in values) + num_copies * sum(one.nbytes for one in parameters)


class LoopChanges:
    """Compares each step of a loop with the one that its plan was made from.

    Attributes:
        is_outgrown: whether the loop trains other models than the trace and the plan are of.
        why: says why a step is recorded after there was a plan; "" of the first one.
    """

    def __init__(self, live: LivePlan, borders: StepBorders, recovery: Recovery, forwards: SmallerForwards) -> None:
        self._live, self._borders, self._recovery, self._forwards = live, borders, recovery, forwards
        self._gradient: tuple[int, int] | None = _UNKNOWN
        """The first gradient as the last forward began, where steps have several."""
        self._stages = Stages()
        self._called: frozenset[int] = frozenset()
        """The models, by their id, that were called in the step that the present plan was made from."""
        self._turns: dict[frozenset[int], tuple[Revision, Stages]] = {}
        """The plans of steps in which others of the models were called, which have turns of several steps."""
        self._layers: Layers | None = None
        self._num_planned_for = 0
        """Optimizers that had stepped when the plan was made."""
        self.is_outgrown, self.why = False, ""

    @property
    def layers(self) -> Layers:
        """Returns the layers of what is trained now."""
        model = self._borders.attached_model
        if self._layers is None or self._layers.model is not model:
            self._layers = Layers(model)
        return self._layers

    def outgrow(self, model: nn.Module) -> None:
        """Follows other models from the next step on, which is to be recorded."""
        last = models_of(self._borders.attached_model)[-1]
        kept_bytes = _standing_bytes(last, self._borders.optimizers)
        self._borders.attach_instead(model)
        self._turns.clear()  # an account of these models alone, by ids that others may get once they are gone
        self._called = frozenset()
        self.is_outgrown = True
        self.why = (
            "more models are trained, or other ones; if the script keeps each that it has trained, the last one takes "
            f"some {format_bytes(kept_bytes, rounding='up')} more, with its gradients and its optimizer's state, and "
            "so may those that follow"
        )

    def recording_begins(self) -> None:
        """Notes which parameters take gradients in the step that is recorded, or that a given plan is for."""
        self._stages.begin(self.layers.trained())

    def recording_ends(self) -> None:
        """Notes which models and how many optimizers the plan is for."""
        self._called, self._num_planned_for = self._borders.turns.called_models, len(self._borders.stepped)

    def are_to_be_recorded(self, *, is_running: bool) -> bool:
        """Returns whether the step that begins is another one; where a plan is known for it, that one takes effect.

        While a rank has no more batches the plan stays: it would not come to where ranks plan, or change theirs.

        Args:
            is_running: whether there is a plan; without one only other models count.
        """
        self._gradient = _UNKNOWN if self._borders.had_one_forward else self.layers.first_gradient()
        ranks = self._live.ranks
        if ranks is not None and not ranks.have_inputs:
            return False
        if self.is_outgrown:
            self.is_outgrown = False
            return True
        if not is_running:
            return False
        if self.has_newcomer if ranks is None else ranks.have_newcomer:
            self.why = "another optimizer has begun to step"
        elif self._is_new_turn():
            self.why = "another one of the models that are trained has its turn"
        elif self._is_new_stage():
            num_more = sum(self.layers.trained()) - sum(self._stages.planned)
            self.why = f"{num_more} more parameters take gradients than before" * (num_more > 0)
        elif self.is_longer if ranks is None else ranks.have_longer:
            before = self._live.trace
            sizes = (list(self._borders.input_shape), list(before.input_shape) if before is not None else [])
            here = self.is_longer
            self.why = "a longer batch came: {} after {}".format(*sizes) if here else "another rank has a longer batch"
        else:
            return False
        return True

    @property
    def has_newcomer(self) -> bool:
        """Tells whether an optimizer has stepped whose state is in no forecast: its first step followed the plan."""
        return not self._live.is_given and len(self._borders.stepped) > self._num_planned_for

    @property
    def is_longer(self) -> bool:
        """Tells whether the batch is larger than the recorded one, and the plan has no room for that.

        Ranks get batches of their own: all of them record where this is so on one. A loop that hands its batches over
        has a step done again that ran out of memory.
        """
        here = self._live
        is_fixed = here.is_given or here.in_effect.is_cooperative
        return not is_fixed and is_too_large(self._borders.input_shape, here.trace, here.plan, self._recorded)

    @property
    def _recorded(self) -> Collection[Shape]:
        called, trace = self._borders.called, self._live.trace
        return () if called is None or trace is None else self._forwards.recorded_with(called, trace.input_shape)

    def begins_anew(self) -> bool:
        """Tells whether a step is to be recorded from a further forward on, for whose batch another plan has room.

        Of a loop that adds up the gradients of several batches: those so far are in the parameters, and nothing else is
        left of them. To be asked before each further forward.
        """
        here = self._live
        before, self._gradient = self._gradient, self.layers.first_gradient()
        return (
            self._gradient not in (before, None)  # a backward has run since
            and before != _UNKNOWN
            and here.plan is not None
            and not is_tight(here.plan)
            and here.trace is not None
            and here.trace.device == "cpu"
            and here.ranks is None
            and len(models_of(self._borders.attached_model)) == 1
            and not here.in_effect.keeper.is_away
            and not here.in_effect.parameters.away_bytes
            and self.is_longer
        )

    def _is_new_turn(self) -> bool:
        """Tells whether a model begins the step that was not called in the one that was planned, nor in an earlier one.

        Models may have turns of several steps, as where a population of them is trained: a plan of some does nothing
        to the others. Where a plan of this model's turn is known, it takes the place of the present one.
        """
        called, here = self._borders.called, self._live
        if here.is_given or self._borders.is_ahead or called is None or not self._called or id(called) in self._called:
            return False
        present = here.present
        self._turns[self._called] = present, self._stages
        known = next((models for models in self._turns if id(called) in models), None)
        revision, self._stages = (None, Stages()) if known is None else self._turns[known]
        if known is None or revision is None or revision.budget_bytes > present.budget_bytes:
            return True  # a plan for more than can be had, as turned out since, is of no use any more
        self._called = known
        self._recovery.forget_excess()
        here.change_to(revision)
        return False

    def _is_new_stage(self) -> bool:
        """Tells whether the loop has frozen or unfrozen parameters since the step was recorded: another graph.

        One that it comes back to is not new: its plan takes the place of the present one.
        """
        stage = self.layers.trained()
        if self._live.is_given or stage == self._stages.planned:
            self._stages.goes_on()
            return False
        present = self._live.present
        revision = self._stages.change(stage, present)
        if revision is None:
            return True
        if revision is not present:
            self._recovery.forget_excess()
            self._live.change_to(revision)
        return False
