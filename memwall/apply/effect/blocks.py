"""Recomputation, rebuilding and offload of a block: seen in what its wrapper counts.

A block that is not part of a step shows nothing, neither for nor against. That it was part of one is known from the
gradient of a weight that no other module holds: it arrives whichever way the block was called.
"""

from collections import Counter

from torch import nn

from memwall.apply.block_counts import BlockCounts
from memwall.apply.optimizer_state.gradient_hooks import OwnHook
from memwall.planning.techniques.offload import Offload
from memwall.planning.techniques.rebuild import Rebuild
from memwall.planning.techniques.recompute import Recompute

__all__ = ["OffloadEffect", "RebuildEffect", "RecomputeEffect", "Watched", "own_weight"]


class Watched:
    """A block that has just been wrapped, and how often its backward was seen."""

    def __init__(self, module: nn.Module, counts: BlockCounts, weight: nn.Parameter | None) -> None:
        self.module, self.counts, self._wrapper = module, counts, module.forward
        self.num_gradients = 0
        self._handle = (
            None if weight is None else weight.register_post_accumulate_grad_hook(OwnHook(self._note_gradient))
        )

    def _note_gradient(self, _: object) -> None:
        self.num_gradients += 1

    def bypassed(self) -> str:
        """Why the wrapper saw nothing of a block that was trained; "" if it was called, or the block was not run."""
        if self.counts.num_calls or not self.num_gradients:
            return ""
        name = type(self.module).__name__
        if self.module.__dict__.get("forward") is not self._wrapper:
            return f"its gradients arrived, but something replaced its forward after memwall wrapped {name}.forward"
        return f"its gradients arrived, but its forward was not called: the model calls {name}.forward or a part of it"

    def close(self) -> None:
        """Takes the hook away."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class RecomputeEffect:
    """The block's operations ran again in backward, once, and for this action."""

    def __init__(self, action: Recompute, watched: Watched, *, is_nested: bool) -> None:
        self.name = f"recompute of '{action.block}'"
        self.expected = "its forward runs again in backward in place of keeping what it saves"
        self._watched, self._is_nested = watched, is_nested

    def is_seen(self) -> bool:
        """See `Effect`."""
        counts = self._watched.counts
        return counts.num_reruns > 0 or bool(counts.dropped)  # the log has said that it is dropped

    def contrary(self) -> str:
        """See `Effect`."""
        counts = self._watched.counts
        if counts.num_in_backward and not self._is_nested:
            return (
                "another checkpoint calls the block again in backward, so that its tensors were not kept anyway; turn "
                "gradient checkpointing off in the model, or make the plan with it on"
            )
        if counts.num_calls and not counts.num_reruns and not counts.dropped and self._watched.num_gradients:
            return (
                f"it was called {counts.num_calls} times and its gradients arrived, but nothing ran again: hooks of "
                "its own keep the tensors that it saves"
            )
        return self._watched.bypassed()

    def close(self) -> None:
        """See `Effect`."""
        self._watched.close()


class RebuildEffect:
    """Results of fused kernels that the block's layers saved became recipes."""

    def __init__(self, action: Rebuild, watched: Watched) -> None:
        self.name = f"rebuilding in '{action.block}'"
        self.expected = "what its fused kernels return is not kept for backward"
        self._watched = watched

    def is_seen(self) -> bool:
        """See `Effect`."""
        return self._watched.counts.num_rebuilt > 0

    def contrary(self) -> str:
        """See `Effect`."""
        counts = self._watched.counts
        if counts.num_rebuilt or not self._watched.num_gradients:
            return ""
        if counts.num_calls:
            return (
                f"it was called {counts.num_calls} times and its gradients arrived, but none of the tensors that it "
                "saved came from a fused kernel: no kernel runs in it, or a checkpoint or saved-tensor hooks of its "
                "own take them"
            )
        return self._watched.bypassed()

    def close(self) -> None:
        """See `Effect`."""
        self._watched.close()


class OffloadEffect:
    """Bytes of what the block saves were moved."""

    def __init__(self, action: Offload, watched: Watched) -> None:
        self.name = f"offload of '{action.block}'"
        self.expected = f"what it saves, from {action.min_bytes} bytes a tensor, moves to the {action.tier}"
        self._watched = watched

    def is_seen(self) -> bool:
        """See `Effect`."""
        return self._watched.counts.num_moved > 0

    def contrary(self) -> str:
        """See `Effect`. Tensors that are smaller than in the plan, of a short batch, say nothing."""
        counts = self._watched.counts
        if counts.num_moved or not self._watched.num_gradients:
            return ""
        if counts.num_immovable:
            return f"{counts.num_immovable} saved tensors are of a kind that cannot be moved, such as a subclass"
        if counts.num_calls and not counts.num_offered:
            return (
                f"it was called {counts.num_calls} times, and none of the tensors that it saves was offered: a "
                "checkpoint or saved-tensor hooks of its own take them"
            )
        return self._watched.bypassed()

    def close(self) -> None:
        """See `Effect`."""
        self._watched.close()


def own_weight(model: nn.Module, block: nn.Module) -> nn.Parameter | None:
    """A trainable parameter of the block that no other module holds; a matrix, if it has one."""
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    own = [p for p in block.parameters() if p.requires_grad and p.is_leaf and holders[id(p)] == 1]
    return max(own, key=lambda p: p.dim() > 1, default=None)
