"""Says what hears where the steps of a loop begin and end."""

from typing import Protocol

import torch
from torch import Tensor


class StepListener(Protocol):
    """Is told what happens; every call comes from within a hook."""

    def before_forward(self) -> None:
        """Hears that any forward of the model begins, but for those that recompute."""

    def evaluation_begins(self) -> None:
        """Hears that a forward without gradients begins, between two steps."""

    def saving_begins(self) -> None:
        """Hears that a state dictionary of the model or an optimizer is about to be made, between two steps."""

    def array_begins(self, tensor: Tensor) -> None:
        """Hears that the loop has a tensor of its own shown as numpy's, outside of forward and backward."""

    def step_begins(self) -> None:
        """Hears that the first forward of a training step begins; the step before, if there was one, is over."""

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Hears that an optimizer of the model is about to step."""

    def step_skipped(self) -> None:
        """Hears that the step that has begun is over, though no optimizer has stepped: a gradient overflowed."""

    def optimizer_stepped(self, *, is_first: bool) -> None:
        """Hears that an optimizer has stepped: the first of a step that was begun, which ends it, or a further one."""
