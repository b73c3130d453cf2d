"""Lower precision and accumulation: seen at the model's own call, whoever carries them out."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memwall.apply.microbatch import MicroBatches, tensors_in
from memwall.planning.actions import Accumulate, Autocast
from memwall.torch_internals.autograd import current_node, has_input_dtypes, input_dtypes
from memwall.trace.attached import attach_hook

__all__ = ["AccumulationEffect", "AutocastEffect"]

_log = logging.getLogger(__name__)


class AutocastEffect:
    """Forward leaves results of the lower precision in the graph.

    The graph is walked once, after the first forward that has one; each node knows the dtype of what it computed.
    """

    def __init__(self, action: Autocast, model: nn.Module) -> None:
        self.name = f"autocast to {action.dtype}"
        self.expected = f"operations of the forward compute in {action.dtype}"
        self._dtype = torch.bfloat16 if action.dtype == "bfloat16" else torch.float16
        self._num_nodes = 0
        # Where torch does not tell dtypes, whether autocast has an effect is not known, and nothing is said.
        self._is_seen = not has_input_dtypes
        if not has_input_dtypes:
            _log.warning("%s: whether it has an effect cannot be seen with torch %s", self.name, torch.__version__)
        self._handle = attach_hook(model.register_forward_hook, self._after_forward)

    def _after_forward(self, _: nn.Module, args: Any, out: Any) -> None:
        if self._is_seen or not torch.is_grad_enabled():
            return
        for node in _nodes(out):
            self._num_nodes += 1
            if type(node).__name__ == "CheckpointFunctionBackward" or any(
                dtype == self._dtype for dtype in input_dtypes(node)
            ):  # what a reentrant checkpoint holds is no part of the graph
                self._is_seen = True
                return

    def is_seen(self) -> bool:
        """See `Effect`."""
        return self._is_seen

    def contrary(self) -> str:
        """See `Effect`."""
        if self._is_seen or not self._num_nodes:
            return ""
        return (
            f"none of the {self._num_nodes} operations in the graph does: the model switches autocast off, or its "
            "weights are in a precision that autocast leaves alone (float64)"
        )

    def close(self) -> None:
        """See `Effect`."""
        self._handle.remove()


class AccumulationEffect:
    """The model is called with micro-batches, and the optimizer steps after the last of them.

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
        """See `Effect`."""
        return self._num_last > 1

    def contrary(self) -> str:
        """See `Effect`."""
        self._num_last, self._num_calls = self._num_calls, 0
        if self._whole:
            return self._whole
        if self._micro is not None and self._micro.num_left:
            return (
                f"the optimizer stepped after {self._num_last} calls, with {self._micro.num_left} micro-batches to come"
            )
        return ""

    def close(self) -> None:
        """See `Effect`."""
        self._handle.remove()


def _nodes(out: Any) -> Iterator[Any]:
    """The graph's nodes, from what a model returned."""
    stack: list[Any] = [tensor.grad_fn for tensor in tensors_in(out) if tensor.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
