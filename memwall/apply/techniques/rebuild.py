"""Rebuild: what a block's fused kernels return is made again in backward, from what they keep anyway."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from memwall.apply.block_technique import BlockEffect, BlockHandler
from memwall.apply.blocks.executor import BlockCall, BlockLayer
from memwall.apply.technique import Target, register
from memwall.planning.techniques.rebuild import Rebuild
from memwall.triton_kernels import recompute_handles

__all__ = ["RebuildEffect", "RebuildHandler", "RebuildLayer"]


class RebuildLayer(BlockLayer):
    """Keeps handles in place of results; what has no recipe goes on to the engine that takes the block's tensors."""

    depth = 1

    def around(self, call: BlockCall) -> AbstractContextManager[None]:
        return _rebuilding(call)


@contextmanager
def _rebuilding(call: BlockCall) -> Iterator[None]:
    with recompute_handles(call.engine) as handles:
        try:
            yield
        finally:
            call.counts.note_rebuilt(handles.num_replaced)


class RebuildEffect(BlockEffect):
    """Sees that results of fused kernels that the block's layers saved became recipes."""

    def __init__(self, action: Rebuild, target: Target) -> None:
        super().__init__(action, target)
        self.name = f"rebuilding in '{action.block}'"
        self.expected = "what its fused kernels return is not kept for backward"

    def is_seen(self) -> bool:
        return self._counts.num_rebuilt > 0

    def contrary(self) -> str:
        counts = self._counts
        if counts.num_rebuilt or not self._num_gradients:
            return ""
        if counts.num_calls:
            return (
                f"it was called {counts.num_calls} times and its gradients arrived, but none of the tensors that it "
                "saved came from a fused kernel: no kernel runs in it, or a checkpoint or saved-tensor hooks of its "
                "own take them"
            )
        return self.bypassed()


@register("rebuild")
class RebuildHandler(BlockHandler[Rebuild]):
    """Rebuilds in one block."""

    watches = RebuildEffect

    def layer(self, target: Target) -> RebuildLayer:
        return RebuildLayer()
