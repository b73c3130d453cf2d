"""Recompute: a block's forward runs again in backward, in place of keeping what it saves."""

from collections.abc import Callable

from torch import nn

from memwall.apply.block_technique import BlockEffect, BlockHandler
from memwall.apply.blocks.counts import BlockCounts
from memwall.apply.blocks.executor import BlockLayer, Forward
from memwall.apply.blocks.recomputed import RecomputedBlock
from memwall.apply.technique import Target, Zero, register
from memwall.planning.techniques.recompute import Recompute


class RecomputeLayer(BlockLayer):
    """Runs the block's own forward under a checkpoint."""

    depth = 0

    def __init__(self, action: Recompute, room_bytes: Callable[[], int | None] = lambda: None) -> None:
        self._action, self._room_bytes = action, room_bytes

    def wrapped(self, module: nn.Module, forward: Forward, counts: BlockCounts) -> Forward:
        self._block = RecomputedBlock(module, forward, self._action, counts, self._room_bytes)
        return self._block.run

    def set_proving(self, is_proving: bool) -> None:
        if is_proving:
            self._block.prove_again()


class RecomputeEffect(BlockEffect):
    """Sees that the block's operations ran again in backward, once, and for this action."""

    def __init__(self, action: Recompute, target: Target) -> None:
        super().__init__(action, target)
        self.name = f"recompute of '{action.block}'"
        self.expected = "its forward runs again in backward in place of keeping what it saves"
        others = (h.action.block for h in target.handlers if isinstance(h, RecomputeHandler))
        self._is_nested = any(action.block.startswith(f"{block}.") for block in others)

    def is_seen(self) -> bool:
        return self._counts.num_reruns > 0

    def contrary(self) -> str:
        counts = self._counts
        if counts.num_in_backward and not self._is_nested:
            return (
                "another checkpoint calls the block again in backward, so that its tensors were not kept anyway; turn "
                "gradient checkpointing off in the model, or make the plan with it on"
            )
        if counts.num_calls and not counts.num_reruns and self._num_gradients:
            return (
                f"it was called {counts.num_calls} times and its gradients arrived, but nothing ran again: hooks of "
                "its own keep the tensors that it saves"
            )
        return self.bypassed()


@register("recompute")
class RecomputeHandler(BlockHandler[Recompute]):
    """Recomputes one block."""

    watches = RecomputeEffect

    def layer(self, target: Target) -> RecomputeLayer:
        return RecomputeLayer(self.action, target.room())

    def lost(self, target: Target) -> str:
        return target.blocks.wrapped(self.action.block)[1].dropped

    def why_not_under_deepspeed(self, zero: Zero) -> str | None:
        if not zero.lends_weights:
            return None
        return (
            f"the plan recomputes '{self.action.block}', and on one rank ZeRO stage 3 lends weights out of its NVMe "
            "buffers: recomputation saves such a weight, the buffer goes to the next parameter, and gradients are "
            "wrong without a word. Keep parameters in memory, train on two ranks or more, or make a plan that "
            "recomputes nothing"
        )
