"""Records the first steps of a script, and ends it when there are enough."""

import torch
from torch import Tensor, nn

from memwall.integrations.scripts.execution import ScriptEnded
from memwall.machine.meter import meter_of, return_free_memory
from memwall.session.measurements import standing_bytes
from memwall.session.step_borders import StepBorders
from memwall.trace.trace_builder import TraceBuilder


class Profile:
    """Listens to the borders of a script's steps, and records so many of them."""

    def __init__(self, num_steps: int) -> None:
        self.borders = StepBorders(self)
        self.builder: TraceBuilder | None = None
        self.num_recorded = 0
        self.base_bytes: int | None = None
        self._num_steps = num_steps

    def begins(self, model: nn.Module, called: nn.Module, has_optimizer: bool) -> None:
        """Follows what is trained; recorded steps of less than that are forgotten."""
        if self.builder is not None:
            self.builder.cancel_step()
            self.borders.attach_instead(model)
        else:
            self.borders.attach(model, ())
        builder = self.builder = TraceBuilder([model])
        self.num_recorded = 0
        if not has_optimizer:
            self.borders.is_changed_by_hand = lambda: builder.is_changed_by_hand
        self.borders.enter_forward(called)

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows an optimizer, too, from its first step on."""
        if optimizer not in self.borders.optimizers:
            self.borders.add_optimizer(optimizer)

    def step_begins(self) -> None:
        """Ends the recording of the step before, and begins the next; ends the script when there are enough."""
        builder, optimizers = self.builder, self.borders.optimizers
        assert builder is not None
        model = builder.roots[0]
        self.end_step()
        if self.num_recorded >= self._num_steps:
            standing = standing_bytes(model, optimizers, builder.trace(optimizers))
            return_free_memory()
            # After the steps: threads, loaded code and caches of the libraries are part of what every further step
            # finds.
            self.base_bytes = meter_of(model).base_bytes(standing)
            raise ScriptEnded
        builder.start_step(optimizers, running_root=self.borders.called, begins_step=self.borders.begins_step)

    def end_step(self) -> None:
        """Ends the recording of a step that is over; one that is not is forgotten."""
        if self.builder is not None and self.builder.is_recording and not self.borders.in_step:
            self.builder.finish_step(self.borders.optimizers)
            self.num_recorded += 1

    def close(self) -> None:
        """Takes every hook away."""
        self.borders.detach()
        if self.builder is not None:
            self.builder.cancel_step()

    def before_forward(self) -> None:
        """Has nothing to do before other forwards."""

    def evaluation_begins(self) -> None:
        """Ends the recording of the step before, so that it is not recorded with an evaluation."""
        self.end_step()

    def saving_begins(self) -> None:
        """Has nothing to do before a saving."""

    def array_begins(self, tensor: Tensor) -> None:
        """Has nothing to do before an array is made."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Has nothing to do before an optimizer steps."""

    def optimizer_stepped(self, *, is_first: bool) -> None:
        """Has nothing to do after an optimizer's step."""

    def step_skipped(self) -> None:
        """Forgets the recording of a step that gradient scaling leaves out: no optimizer has stepped in it."""
        if self.builder is not None:
            self.builder.cancel_step()
