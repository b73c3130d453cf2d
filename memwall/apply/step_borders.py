"""Where training steps begin and end in a loop that says nothing of them: hooks on its model and its optimizer."""

from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memwall.trace.attached import attach_hook

__all__ = ["Phase", "StepBorders", "StepListener"]

Phase = Literal["forward", "backward", "optimizer step", "evaluation", "saving", "between steps"]


class StepListener(Protocol):
    """Who is told; every call comes from within a hook."""

    def before_forward(self) -> None:
        """Any forward of the model begins, but for those that recompute."""

    def evaluation_begins(self) -> None:
        """A forward without gradients begins, between two steps."""

    def saving_begins(self) -> None:
        """A state dictionary of the model or the optimizer is about to be made, between two steps."""

    def step_begins(self) -> None:
        """The first forward of a training step begins; the step before, if there was one, is over."""

    def step_began(self) -> None:
        """What was to be done between the steps is done."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer is about to step."""

    def optimizer_stepped(self) -> None:
        """The optimizer has stepped, which ends a training step that was begun."""


class StepBorders:
    """Follows one model and one optimizer, which may show itself later."""

    def __init__(self, listener: StepListener) -> None:
        self._listener = listener
        self._handles: list[Any] = []
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.phase: Phase = "between steps"
        """What runs now, or ran last: an evaluation, say, lasts until the next step or saving begins. Of a step whose
        optimizer has not stepped it is "forward": a backward tells nobody that it begins."""
        self.in_step = False
        """Whether a step has begun whose optimizer has not stepped yet."""
        self.in_first_forward = False
        """Whether the model's forward is about to be called, from within the hook before it."""

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """Begins to follow a model, and its optimizer where it is known."""
        self.model = model
        self._handles += (
            attach_hook(model.register_forward_pre_hook, self._before_forward, with_kwargs=True, prepend=True),
            attach_hook(model.register_state_dict_pre_hook, self._before_saving),
        )
        if optimizer is not None:
            self.set_optimizer(optimizer)

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins to follow an optimizer."""
        self.optimizer = optimizer
        self._handles += (
            optimizer.register_step_pre_hook(self._enter_optimizer),
            optimizer.register_step_post_hook(self._after_optimizer),
            optimizer.register_state_dict_pre_hook(self._before_saving),
        )

    def watch_optimizers(self) -> None:
        """From now on the listener is told before the optimizer steps, after every other hook of it."""
        self._handles.append(register_optimizer_step_pre_hook(self._before_optimizer))

    def detach(self) -> None:
        """Takes all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def enter_forward(self) -> None:
        """What the hook before each forward does; to be called where that hook came too late for one."""
        self._listener.before_forward()
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
            self.in_first_forward = False
        self.in_step = True
        self._listener.step_began()

    def _before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch._C._current_autograd_node() is None:
            self.enter_forward()

    def _before_saving(self, *_: Any) -> None:
        if not self.in_step:
            self.phase = "saving"
            self._listener.saving_begins()

    def _enter_optimizer(self, *_: Any) -> None:
        if self.in_step:
            self.phase = "optimizer step"

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self.optimizer:
            self._listener.optimizer_begins(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.in_step:
            self.in_step, self.phase = False, "between steps"
            self._listener.optimizer_stepped()
