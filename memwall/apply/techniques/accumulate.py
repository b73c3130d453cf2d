"""Accumulate: the batch of a step is split into micro-batches whose gradients add up."""

from typing import Any

import torch
from torch import nn

from memwall.apply.effect import Effect
from memwall.apply.microbatch import MicroBatches, tensors_in
from memwall.apply.technique import Handler, Target, register
from memwall.errors import ApplyError
from memwall.planning.techniques.accumulate import Accumulate
from memwall.torch_internals.autograd import current_node
from memwall.trace.attached import attach_hook


@register("accumulate")
class AccumulateHandler(Handler[Accumulate]):
    """Has the session divide batches, where the loop takes them from it, unless the loop divides them itself."""

    def apply(self, target: Target) -> None:
        if not target.is_cooperative:
            raise ApplyError(
                f"the plan runs micro-batches of {self.action.micro_batch} samples, "
                f"{self.action.num_micro_batches} per step, but this loop does not take them from memwall; set the "
                "batch size and accumulation yourself, or write `for micro in session.step(batch)`"
            )
        target.micro.divide_into(self.action.micro_batch)
        target.on_undo(lambda: target.micro.divide_into(None))

    def effect(self, target: Target) -> "AccumulationEffect":
        micro = None if target.is_set_by_loop(self) else target.micro
        return AccumulationEffect(self.action, target.model, micro)


class AccumulationEffect(Effect):
    """Sees that the model is called with micro-batches, and the optimizer steps after the last of them.

    Args:
        micro: what divides the batches; None where the training loop does that itself.
    """

    def __init__(self, action: Accumulate, model: nn.Module, micro: MicroBatches | None) -> None:
        self.name = f"micro-batches of {action.micro_batch}"
        self.expected = (
            f"the model is called {action.num_micro_batches} times a step, with {action.micro_batch} samples"
        )
        self._micro_batch, self._micro = action.micro_batch, micro
        self._num_calls = self._num_last = 0
        self._whole = ""
        self._handle = attach_hook(model.register_forward_pre_hook, self._before_forward, with_kwargs=True)

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or current_node() is not None:
            return
        if self._micro is not None and self._micro.is_comparing:
            return
        self._num_calls += 1
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.dim() > 0]
        if self._micro is not None:
            whole = next((tensor for tensor in tensors if self._micro.is_undivided(tensor)), None)
            if whole is not None:
                self._whole = f"it was called with the undivided batch, a tensor of shape {tuple(whole.shape)}"
            return
        # Some tensors of a sample may be several rows, as an image's patches are: the one with the fewest counts.
        num_samples = min((tensor.shape[0] for tensor in tensors), default=0)
        if num_samples > self._micro_batch:
            self._whole = f"it was called with {num_samples} samples at once"

    def is_seen(self) -> bool:
        return self._num_last > 1

    def contrary(self) -> str:
        self._num_last, self._num_calls = self._num_calls, 0
        if self._whole:
            return self._whole
        if self._micro is not None and self._micro.num_left:
            return (
                f"the optimizer stepped after {self._num_last} calls, with {self._micro.num_left} micro-batches to come"
            )
        return ""

    def close(self) -> None:
        self._handle.undo()
