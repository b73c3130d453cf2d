"""Fused kernels in the step that a session records, where they are allowed: it is the leanest there is.

A plan made from that step has them in it. Whether the model's own modules would be faster is not asked: that would take
a second recording, in which the step may not fit.
"""

import logging

from torch import nn

from memwall.apply.kernels.head import chunk_rows_of
from memwall.apply.kernels.patched import PatchedKernels, patch_kernels
from memwall.planning.techniques.kernels import FusedKernels, can_use_kernels, kernels_in
from memwall.trace.records import Trace

__all__ = ["RecordedKernels"]

_log = logging.getLogger(__name__)


class RecordedKernels:
    """Puts them into the model before the recording, and tells afterwards what there was of them."""

    def __init__(self) -> None:
        self._patched: PatchedKernels | None = None
        self._chunk_rows = 0

    def begin(self, model: nn.Module, allow: tuple[str, ...], *, is_streamed: bool) -> None:
        """To be called before the recording; where kernels are not allowed or cannot run, the model stays as it is.

        Args:
            is_streamed: whether parameters are on disk until their own module is called.
        """
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        if self._patched is not None or "kernels" not in allow:
            return
        reason = can_use_kernels(device, allow, is_here=True)
        if is_streamed:
            reason = "the budget has no room for the parameters, and on disk only their own modules read them"
        if reason is not None:
            _log.warning("kernels are allowed, but no fused kernels run: %s", reason)
            return
        self._chunk_rows = chunk_rows_of(model)
        self._patched = patch_kernels(model, chunk_rows=self._chunk_rows)

    def found_in(self, trace: Trace) -> FusedKernels | None:
        """What ran in the recorded step in place of modules' own forwards."""
        return None if self._patched is None else kernels_in(trace, self._chunk_rows)

    def end(self) -> None:
        """The model runs its own forwards again. Safe to call twice."""
        if self._patched is not None:
            patched, self._patched = self._patched, None
            patched.undo()
