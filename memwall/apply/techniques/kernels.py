"""Fused kernels: they run in place of modules' own forwards, and the loss of a language model without its logits."""

import logging

from torch import nn

from memwall.apply.effect import Effect
from memwall.apply.kernels.head import chunk_rows_of
from memwall.apply.kernels.patched import PatchedKernels, apply_kernels, patch_kernels
from memwall.apply.technique import Handler, InRecording, Target, register
from memwall.planning.settings import Settings
from memwall.planning.techniques.kernels import TECHNIQUE, FusedKernels, can_use_kernels, kernels_in

_log = logging.getLogger(__name__)


@register("kernels")
class KernelsHandler(Handler[FusedKernels]):
    """Replaces the forwards that the plan names."""

    _patched: PatchedKernels | None = None

    @classmethod
    def begin_recording(cls, model: nn.Module, settings: Settings, *, is_streamed: bool) -> InRecording | None:
        """Patches the model: with fused kernels its step is the leanest there is, and a plan made from it has them in.

        Whether the model's own modules would be faster is not asked: that would take a second recording, in which the
        step may not fit.
        """
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        reason = can_use_kernels(device, (TECHNIQUE.allow,), is_here=True)
        if is_streamed:
            reason = "the budget has no room for the parameters, and on disk only their own modules read them"
        if reason is not None:
            _log.warning("kernels are allowed, but no fused kernels run: %s", reason)
            return None
        chunk_rows = chunk_rows_of(model)
        return InRecording(
            patch_kernels(model, chunk_rows=chunk_rows).undo,
            lambda settings, trace: settings.with_standing(FusedKernels, kernels_in(trace, chunk_rows)),
        )

    def apply(self, target: Target) -> None:
        self._patched = apply_kernels(target.model, self.action.modules, self.action.chunk_rows)
        target.on_undo(self._patched.undo)

    def effect(self, target: Target) -> "KernelsEffect | None":
        return None if self._patched is None else KernelsEffect(self.action, self._patched)


class KernelsEffect(Effect):
    """Sees that a module was called through its kernel, and that the loss did not ask for logits.

    Not every one of them: a mixture of experts calls those that its tokens chose.
    """

    def __init__(self, action: FusedKernels, kernels: PatchedKernels) -> None:
        self.name = f"fused kernels in {len(action.modules)} modules"
        self.expected = "the model calls its norms and gated MLPs"
        if action.chunk_rows:
            self.name += " and the loss"
            self.expected += f", and its loss holds logits for {action.chunk_rows} rows at a time"
        self._action, self._kernels = action, kernels

    def is_seen(self) -> bool:
        return self._has_called and (not self._action.chunk_rows or self._kernels.losses.num_losses > 0)

    @property
    def _has_called(self) -> bool:
        calls = self._kernels.num_calls
        return not self._action.modules or any(calls.get(path) for path in self._action.modules)

    def contrary(self) -> str:
        if not self._has_called:
            return "none of them was called: their forwards were replaced by others, or the model goes past them"
        losses = self._kernels.losses
        if self._action.chunk_rows and not losses.num_losses and losses.asked_by:
            return f"the logits were made whole for {losses.asked_by}"
        return ""
