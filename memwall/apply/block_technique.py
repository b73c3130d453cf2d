"""Holds what techniques that treat single blocks share: their layers are put around the model's blocks together.

Their effects are seen in what a block's wrapper counts. A block that is not part of a step shows nothing, neither for
nor against. That it was part of one is known from the gradient of a weight that no other module holds: it arrives
whichever way the block was called.
"""

from collections import Counter
from typing import Any, ClassVar, TypeVar

from torch import nn

from memwall.apply.blocks.executor import BlockLayer
from memwall.apply.effect import Effect
from memwall.apply.technique import Handler, Target
from memwall.trace.attached import forward_of
from memwall.trace.gradients.gradient_hooks import OwnHook
from memwall.trace.together import models_of

B = TypeVar("B", bound=Any)


class BlockEffect(Effect):
    """Watches what the wrapper of a block counts, and how often the block's backward was seen.

    Args:
        action: names the block.
        target: where the block has just been wrapped.
    """

    def __init__(self, action: Any, target: Target) -> None:
        self._module, self._counts = target.blocks.wrapped(action.block)
        self._wrapper = forward_of(self._module)
        self._num_gradients = 0
        weight = _own_weight(target.model, self._module)
        self._handle = (
            None if weight is None else weight.register_post_accumulate_grad_hook(OwnHook(self._note_gradient))
        )

    def _note_gradient(self, _: object) -> None:
        self._num_gradients += 1

    def bypassed(self) -> str:
        """Returns why the wrapper saw nothing of a trained block; "" if it was called or the block did not run."""
        if self._counts.num_calls or not self._num_gradients:
            return ""
        name = type(self._module).__name__
        if forward_of(self._module) is not self._wrapper:
            return f"its gradients arrived, but something replaced its forward after memwall wrapped {name}.forward"
        return f"its gradients arrived, but its forward was not called: the model calls {name}.forward or a part of it"

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None


class BlockHandler(Handler[B]):
    """Treats the block that its action names in a field `block`."""

    watches: ClassVar[type[BlockEffect]]
    """Makes what watches the block."""
    _layer: BlockLayer | None = None

    def layer(self, target: Target) -> BlockLayer:
        """Returns what goes around the block; what it opens for that it tells `target.on_undo`.

        Raises:
            MemwallError: this cannot be done here.
        """
        raise NotImplementedError

    def apply(self, target: Target) -> None:
        """Wraps the blocks of all such actions, with the first of them.

        Raises:
            MemwallError: a block is missing or cannot be wrapped, or what it needs cannot be had.
        """
        if target.blocks.is_applied:
            return
        for handler in target.handlers:
            if isinstance(handler, BlockHandler):
                handler._layer = handler.layer(target)
                target.blocks.add(handler.action.block, handler._layer)
        target.on_undo(target.blocks.undo)
        target.blocks.apply()

    def set_proving(self, target: Target, *, is_proving: bool) -> None:
        if self._layer is not None:
            self._layer.set_proving(is_proving)

    def effect(self, target: Target) -> BlockEffect | None:
        """Watches the block. A model as one block may be wrapped while it is being called: that call says nothing."""
        module, _ = target.blocks.wrapped(self.action.block)
        return None if any(module is model for model in models_of(target.model)) else self.watches(self.action, target)


def _own_weight(model: nn.Module, block: nn.Module) -> nn.Parameter | None:
    """Returns a trainable parameter of the block that no other module holds; a matrix, if it has one."""
    holders = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    own = [p for p in nn.Module.parameters(block) if p.requires_grad and p.is_leaf and holders[id(p)] == 1]
    return max(own, key=lambda p: p.dim() > 1, default=None)
