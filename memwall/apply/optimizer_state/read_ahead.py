"""State that comes back while backward still runs, as far as a plan has room for it: backward frees what it has used.

A plan says from which gradient of a step on how many bytes of buffers may be there. Gradients are counted as a trace
counts them, each storage once, as they are accumulated, from the last forward on: where another forward comes before
the step, whatever was read is dropped.
"""

import logging
from collections.abc import Callable, Sequence

import torch

from memwall.apply.exhaustion import is_exhaustion
from memwall.apply.optimizer_state.gradient_hooks import OwnHook
from memwall.apply.optimizer_state.ring import in_order
from memwall.apply.optimizer_state.shares import Share
from memwall.errors import StoreError
from memwall.patches import Patches
from memwall.planning.actions import StateAhead
from memwall.predict.state_on_disk import begun_early
from memwall.store.buckets import BucketBuffer, drop_reads

__all__ = ["ReadAhead"]

_log = logging.getLogger(__name__)

# A loop that has a forward between each backward and its step would read everything twice for ever. A gradient scaler
# may leave out a few steps in a row.
_MAX_DROPS = 8


class ReadAhead:
    """Reads the first shares of each step in advance, until `close`.

    Args:
        optimizer: whose parameters' gradients count.
        allowed: how many bytes of buffers may be there from which gradient on.
        coming: the shares of the next step.
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
        self._gradients: set[int] = set()
        """Addresses of their storages, since the last forward or step."""
        self._waiting: list[Share] | None = None
        """Those not begun yet; None before the first of a step."""
        self._begun: dict[Share, BucketBuffer] = {}
        self._num_drops = 0
        """In a row, of something that was read."""
        hook = OwnHook(self._after_gradient)
        self._patches = Patches("reads the optimizer's state ahead of its step")
        for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
            if self._allowed_bytes and parameter.requires_grad:
                self._patches.hook(parameter.register_post_accumulate_grad_hook, hook)

    def take(self) -> dict[Share, BucketBuffer]:
        """What was begun, for the step that begins; whoever takes it waits for it, or drops it."""
        begun, self._begun = self._begun, {}
        self._num_drops = 0 if begun else self._num_drops
        self._gradients.clear()
        self._waiting = None
        return begun

    def drop(self) -> None:
        """No step follows: buffers are freed, and gradients counted from the first."""
        num_drops = self._num_drops + bool(self._begun)
        drop_reads([share.bucket for share in self.take()])
        self._num_drops = num_drops
        if num_drops == _MAX_DROPS:
            self._stop(f"{num_drops} times in a row no step came after it")

    def close(self) -> None:
        """Nothing is read any more."""
        try:
            self._patches.undo()
        finally:
            self.drop()

    def _stop(self, reason: object) -> None:
        if self._allowed_bytes:
            _log.info("the optimizer's state is no longer read ahead of its step: %s", reason)
        self._allowed_bytes = {}

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or gradient.layout is not torch.strided:
            return
        # Several may be views of one storage, and one may be added to again and again.
        address = gradient.untyped_storage().data_ptr()
        if address in self._gradients:
            return
        self._gradients.add(address)
        allowed_bytes = self._allowed_bytes.get(len(self._gradients))
        if allowed_bytes is not None:
            with torch.no_grad():
                self._begin(allowed_bytes)

    def _begin(self, allowed_bytes: int) -> None:
        most_bytes, ring_bytes = max(self._allowed_bytes.values()), self._ring_bytes
        if self._waiting is None:
            shares = [share for share in self._coming() if share.bucket.num_bytes]
            early = {share for share in shares if share.bucket.num_bytes <= most_bytes}
            self._waiting = in_order(shares, ring_bytes=ring_bytes, early=early)
        # A buffer of the ring goes from share to share.
        ring = max(
            (share.bucket.num_bytes for share in self._waiting if share.bucket.num_bytes <= ring_bytes), default=0
        )
        sizes = [max(share.bucket.num_bytes, ring) for share in self._waiting]
        held_bytes = sum(buffer.num_bytes for buffer in self._begun.values())
        try:
            for number in begun_early(
                sizes, ring_bytes=ring_bytes, allowed_bytes=allowed_bytes, most_bytes=most_bytes, held_bytes=held_bytes
            ):
                share = self._waiting[number]
                buffer = share.bucket.new_buffer(sizes[number])
                share.bucket.begin_read(buffer)
                self._begun[share] = buffer
        except (RuntimeError, MemoryError, StoreError) as reason:
            # What is to end the run ends the step. A CPU's memory that cannot be had is a RuntimeError.
            if not isinstance(reason, StoreError) and not is_exhaustion(reason):
                raise
            self._stop(reason)
        self._waiting = [share for share in self._waiting if share not in self._begun]
