"""Offload: what a block saves for backward leaves the device until then."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from memwall.apply.block_technique import BlockEffect, BlockHandler
from memwall.apply.blocks.executor import BlockCall, BlockLayer, OffloadEngine
from memwall.apply.offload.engine import ActivationOffload
from memwall.apply.offload.packed import check_can_pack
from memwall.apply.offload.parking import open_engine
from memwall.apply.offload.proving import Proving
from memwall.apply.technique import Target, Zero, register
from memwall.planning.techniques.offload import LeavingForm, Offload


class OffloadLayer(BlockLayer):
    """Sends what the block saves to an engine, as one group for each call."""

    depth = 2
    wraps_next = True

    def __init__(self, engine: OffloadEngine, form: LeavingForm = "exact") -> None:
        self._engine, self._form = engine, form
        self._is_proving = False
        self._knows_all = False
        """Whether a call was proven in which the block was not recomputed any more: then all that it saves leaves."""

    def set_proving(self, is_proving: bool) -> None:
        self._is_proving = is_proving and self._form == "exact"

    def around(self, call: BlockCall) -> AbstractContextManager[None]:
        if call.counts.stays:
            return nullcontext()
        call.engine = self._engine
        return self._moving(call)

    @contextmanager
    def _moving(self, call: BlockCall) -> Iterator[None]:
        is_new = bool(call.counts.dropped) and not self._knows_all and self._form == "exact"
        hooks = Proving(self._engine, call).hooks() if self._is_proving or is_new else self._engine.hooks()
        self._knows_all |= is_new
        with self._engine.group(call.key, call.counts, self._form), hooks:
            yield


class OffloadEffect(BlockEffect):
    """Sees that bytes of what the block saves were moved."""

    def __init__(self, action: Offload, target: Target) -> None:
        super().__init__(action, target)
        self.name = f"offload of '{action.block}'"
        self.expected = f"what it saves, from {action.min_bytes} bytes a tensor, moves to the {action.tier}"

    def is_seen(self) -> bool:
        return self._counts.num_moved > 0

    def contrary(self) -> str:
        """Returns what was found; tensors that are smaller than in the plan, of a short batch, say nothing."""
        counts = self._counts
        if counts.num_moved or not self._num_gradients:
            return ""
        if counts.num_immovable:
            return f"{counts.num_immovable} saved tensors are of a kind that cannot be moved, such as a subclass"
        if counts.num_calls and not counts.num_offered:
            return (
                f"it was called {counts.num_calls} times, and none of the tensors that it saves was offered: a "
                "checkpoint or saved-tensor hooks of its own take them"
            )
        return self.bypassed()


@register("offload")
class OffloadHandler(BlockHandler[Offload]):
    """Moves what one block saves; all of them share an engine."""

    watches = OffloadEffect

    def layer(self, target: Target) -> OffloadLayer:
        if self.action.form != "exact":
            device = next((p.device for p in target.model.parameters()), torch.device("cpu"))
            check_can_pack(device, self.action.block)
        return OffloadLayer(self._engine_of(target), self.action.form)

    def lost(self, target: Target) -> str:
        return target.blocks.wrapped(self.action.block)[1].stays

    def why_not_under_deepspeed(self, zero: Zero) -> str | None:
        if zero.stage != 3:
            return None
        return (
            f"the plan moves what '{self.action.block}' saves to the {self.action.tier}, and under ZeRO stage 3 "
            "weights come and go in the tensors that autograd saved; take stage 2 (plan.deepspeed_config(stage=2)), or "
            "make the plan without a disk, which recomputes instead"
        )

    def _engine_of(self, target: Target) -> ActivationOffload:
        """Returns the engine that the first such action opens."""
        if target.engine is None:
            target.engine, close = open_engine(
                [target.model],
                disk=target.disk,
                capacity_bytes=target.left_bytes("disk"),
                host_limit_bytes=target.left_bytes("host"),
                window_bytes=self.action.window_bytes,
                min_bytes=self.action.min_bytes,
                owns_pages=target.allocator.owns_pages,
            )
            target.on_undo(close)
        return target.engine
