"""Finds where training steps begin and end in a loop that says nothing of them: hooks on its model and optimizers.

A step begins at the first forward after another step, and is over when an optimizer has stepped. Where several step one
model, what steps after the first of them, before the next forward, belongs to the same step.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.apply.memory.exhaustion import Phase
from memwall.patches import Patches
from memwall.torch_internals.autograd import current_node, execution_is_transformed
from memwall.trace.attached import attach_hook

__all__ = ["StepBorders", "StepListener"]

_log = logging.getLogger(__name__)


class StepListener(Protocol):
    """Is told what happens; every call comes from within a hook."""

    def before_forward(self) -> None:
        """Hears that any forward of the model begins, but for those that recompute."""

    def evaluation_begins(self) -> None:
        """Hears that a forward without gradients begins, between two steps."""

    def saving_begins(self) -> None:
        """Hears that a state dictionary of the model or an optimizer is about to be made, between two steps."""

    def step_begins(self) -> None:
        """Hears that the first forward of a training step begins; the step before, if there was one, is over."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Hears that an optimizer of the model is about to step."""

    def step_skipped(self) -> None:
        """Hears that the step that has begun is over, though no optimizer has stepped: a gradient overflowed."""

    def optimizer_stepped(self, *, is_first: bool) -> None:
        """Hears that an optimizer has stepped: the first of a step that was begun, which ends it, or a further one."""


class StepBorders:
    """Follows one model and its optimizers, which may show themselves later."""

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self._patches = Patches("finds where training steps begin and end")
        self.model: nn.Module | None = None
        self.optimizers: tuple[torch.optim.Optimizer, ...] = ()
        self.stepped: list[torch.optim.Optimizer] = []
        """Optimizers that have stepped so far, in the order of their first steps."""
        self.phase: Phase = "between steps"
        """The part that runs now, or ran last: an evaluation, say, lasts until the next step or saving begins. In a
        step whose optimizers have not stepped it is "forward": a backward tells nobody that it begins."""
        self.in_step = False
        """Tells whether a step has begun in which no optimizer has stepped yet."""
        self.goes_on = False
        """Tells whether a further optimizer's step would belong to the step that one has ended."""
        self._is_watching = False
        self._is_transformed = False
        self.in_first_forward = False
        """Tells whether the model's forward is about to be called, from within the hook before it."""
        self.in_optimizer = False
        """Tells whether an optimizer steps, from a closure in which a step of training may begin."""

    @property
    def attached_model(self) -> nn.Module:
        """Returns the model, which is known."""
        assert self.model is not None
        return self.model

    def attach(self, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begins to follow a model, and its optimizers as far as they are known."""
        self.model = model
        before = self._before_forward
        self._patches.push(attach_hook(model.register_forward_pre_hook, before, with_kwargs=True, prepend=True))
        self._patches.push(attach_hook(model.register_state_dict_pre_hook, self._before_saving))
        self._patches.wrap(torch.amp.GradScaler, "update", self._after_scaling)
        for optimizer in optimizers:
            self.add_optimizer(optimizer)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to follow an optimizer."""
        self.optimizers += (optimizer,)
        self._patches.hook(optimizer.register_step_pre_hook, self._enter_optimizer)
        self._patches.hook(optimizer.register_step_post_hook, self._after_optimizer)
        self._patches.hook(optimizer.register_state_dict_pre_hook, self._before_saving)

    def watch_optimizers(self) -> None:
        """Has the listener told before an optimizer steps, after every other hook of it."""
        if not self._is_watching:
            self._is_watching = True
            self._patches.hook(register_optimizer_step_pre_hook, self._before_optimizer)

    def detach(self) -> None:
        """Takes all hooks away."""
        self._patches.undo()

    def begin_part(self) -> None:
        """Says that a part of a step begins: what fails from here on fails in a forward, or in its backward."""
        self.phase = "forward"

    def drop_step(self) -> None:
        """Forgets the step that has begun: the next forward begins it again."""
        self.in_step = self.in_optimizer = False

    def end_step(self) -> None:
        """Says that every optimizer has stepped: no further one belongs to the step that one has ended."""
        self.goes_on = False

    def enter_forward(self) -> None:
        """Does what the hook before each forward does; to be called where that hook came too late for one."""
        self._listener.before_forward()
        if execution_is_transformed():
            if not self._is_transformed:
                self._is_transformed = True
                _log.warning(
                    "gradients are computed by torch.func, which allows no hooks on saved tensors: such steps run as "
                    "without memwall, and may pass the budget; use loss.backward() to have them planned"
                )
            return
        self.goes_on = False
        if not torch.is_grad_enabled():
            if not self.in_step:
                self.phase = "evaluation"
                self._listener.evaluation_begins()
            return
        self.phase = "forward"
        if self.in_step:
            return  # a further micro-batch of the same step
        self.in_first_forward = True
        try:
            self._listener.step_begins()
        finally:
            self.in_first_forward = self.in_optimizer = False
        self.in_step = True

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if current_node() is None:
            self.enter_forward()

    def _before_saving(self, *_: Any) -> None:
        if not self.in_step:
            self.phase, self.goes_on = "saving", False
            self._listener.saving_begins()

    def _after_scaling(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Ends a step whose optimizers `GradScaler.step` has not called, as it does where a gradient is not finite."""
        original(*args, **kwargs)
        if self.in_step and not self.in_optimizer:
            self.in_step, self.goes_on, self.phase = False, False, "between steps"
            self._listener.step_skipped()

    def _enter_optimizer(self, *_: Any) -> None:
        self.in_optimizer = True
        if self.in_step or self.goes_on:
            self.phase = "optimizer step"

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in self.optimizers:
            self._listener.optimizer_begins(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.in_optimizer = False
        if optimizer not in self.stepped:
            self.stepped.append(optimizer)
        if self.in_step or self.goes_on:
            is_first, self.in_step, self.goes_on, self.phase = self.in_step, False, True, "between steps"
            self._listener.optimizer_stepped(is_first=is_first)
