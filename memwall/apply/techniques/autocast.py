"""Autocast: the model's forward runs in a lower precision where torch's lists allow it."""

import logging
from typing import Any

import torch
from torch import nn

from memwall.apply.effect import Effect
from memwall.apply.microbatch import tensors_in
from memwall.apply.precision import LowerPrecision, lower_dtype, nodes_of
from memwall.apply.technique import Handler, InRecording, Target, register
from memwall.planning.techniques.autocast import TECHNIQUE, Autocast, can_autocast
from memwall.torch_internals.autograd import has_input_dtypes, input_dtypes
from memwall.trace.attached import attach_hook
from memwall.trace.records import Trace

_log = logging.getLogger(__name__)


@register("autocast")
class AutocastHandler(Handler[Autocast]):
    """Puts the model under autocast, unless the loop does."""

    def apply(self, target: Target) -> None:
        target.on_undo(LowerPrecision(target.model, self.action.dtype, is_running=target.is_running).undo)

    def effect(self, target: Target) -> "AutocastEffect":
        return AutocastEffect(self.action, target.model)

    @classmethod
    def record_again(cls, model: nn.Module, trace: Trace, *, is_running: bool) -> InRecording | None:
        if can_autocast(trace, (TECHNIQUE.allow,)) is not None:
            return None
        dtype = lower_dtype(trace.device)
        _log.info("no plan fits in the present precision; the next step is recorded under %s autocast", dtype)
        return InRecording(
            LowerPrecision(model, dtype, is_running=is_running).undo,
            lambda settings, _: settings.with_standing(Autocast, Autocast(dtype=dtype)),
        )


class AutocastEffect(Effect):
    """Sees that forward leaves results of the lower precision in the graph.

    The graph is walked once, after the first forward that has one; each node knows the dtype of what it computed.
    """

    def __init__(self, action: Autocast, model: nn.Module) -> None:
        self.name = f"autocast to {action.dtype}"
        self.expected = f"operations of the forward compute in {action.dtype}"
        self._dtype = torch.bfloat16 if action.dtype == "bfloat16" else torch.float16
        # Where torch does not tell dtypes, whether autocast has an effect is not known, and nothing is said.
        self._is_seen = not has_input_dtypes
        if not has_input_dtypes:
            _log.warning("%s: whether it has an effect cannot be seen with torch %s", self.name, torch.__version__)
        self._num_nodes = 0
        self._handle = attach_hook(model.register_forward_hook, self._after_forward)

    def _after_forward(self, _: nn.Module, args: Any, out: Any) -> None:
        if self._is_seen or not torch.is_grad_enabled():
            return
        for node in nodes_of(tensor.grad_fn for tensor in tensors_in(out)):
            self._num_nodes += 1
            if type(node).__name__ == "CheckpointFunctionBackward" or any(
                dtype == self._dtype for dtype in input_dtypes(node)
            ):  # what a reentrant checkpoint holds is no part of the graph
                self._is_seen = True
                return

    def is_seen(self) -> bool:
        return self._is_seen

    def contrary(self) -> str:
        if self._is_seen or not self._num_nodes:
            return ""
        return (
            f"none of the {self._num_nodes} operations in the graph does: the model switches autocast off, or its "
            "weights are in a precision that autocast leaves alone (float64)"
        )

    def close(self) -> None:
        self._handle.undo()
