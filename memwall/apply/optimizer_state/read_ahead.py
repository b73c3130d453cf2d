"""State that comes back while backward still runs, as far as a plan has room for it: backward frees what it has used.

A plan says from which gradient of a step on how many bytes of buffers may be there. Gradients are counted as they are
accumulated, from the last forward on: where another forward comes before the step, whatever was read is dropped.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memwall.apply.optimizer_state.shares import Share
from memwall.errors import StoreError
from memwall.plan.actions import StateAhead
from memwall.store.buckets import BucketBuffer

__all__ = ["ReadAhead"]

_log = logging.getLogger(__name__)


class ReadAhead:
    """Reads the first shares of each step in advance, until `close`.

    Args:
        optimizer: whose parameters' gradients count.
        allowed: how many bytes of buffers may be there from which gradient on.
        coming: the shares of the next step, in its order.
        ring_bytes: what a buffer of the ring holds.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        allowed: Sequence[StateAhead],
        coming: Callable[[], list[Share]],
        *,
        ring_bytes: int,
    ) -> None:
        self._allowed_bytes = {one.after_gradients: one.buffer_bytes for one in allowed}
        self._coming, self._ring_bytes = coming, ring_bytes
        self._num_gradients = 0
        self._waiting: deque[Share] | None = None
        """Those not begun yet; None before the first of a step."""
        self._begun: dict[Share, BucketBuffer] = {}
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._after_gradient)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if self._allowed_bytes and parameter.requires_grad
        ]

    def take(self) -> dict[Share, BucketBuffer]:
        """What was begun, for the step that begins; whoever takes it waits for it, or drops it."""
        begun, self._begun = self._begun, {}
        self._num_gradients, self._waiting = 0, None
        return begun

    def drop(self) -> None:
        """No step follows: buffers are freed, and gradients counted from the first."""
        for share in self.take():
            share.bucket.drop_read()

    def close(self) -> None:
        """Nothing is read any more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.drop()

    def _after_gradient(self, _: torch.Tensor) -> None:
        self._num_gradients += 1
        allowed_bytes = self._allowed_bytes.get(self._num_gradients)
        if allowed_bytes is not None:
            with torch.no_grad():
                self._begin(allowed_bytes)

    def _begin(self, allowed_bytes: int) -> None:
        if self._waiting is None:
            self._waiting = deque(share for share in self._coming() if share.bucket.num_bytes)
        sizes = [share.bucket.num_bytes for share in self._waiting if share.bucket.num_bytes <= self._ring_bytes]
        held_bytes = sum(buffer.num_bytes for buffer in self._begun.values())
        while self._waiting:
            bucket = self._waiting[0].bucket
            # A buffer of the ring goes from share to share.
            num_bytes = max(sizes) if bucket.num_bytes <= self._ring_bytes else bucket.num_bytes
            if held_bytes + num_bytes > allowed_bytes:
                return
            try:
                buffer = bucket.new_buffer(num_bytes)
                bucket.begin_read(buffer)
            except (torch.OutOfMemoryError, StoreError) as reason:  # what is to end the run ends the step
                _log.info("the optimizer's state is not read ahead of this step: %s", reason)
                self._waiting.clear()
                return
            held_bytes += num_bytes
            self._begun[self._waiting.popleft()] = buffer
