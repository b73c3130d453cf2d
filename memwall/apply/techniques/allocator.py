"""Allocator reuse: how freed memory is kept or returned, on a CPU by a heap, on CUDA by a setting."""

import msgspec
import torch

from memwall.apply.effect import Effect
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.memory.cuda_setting import effective_setting, require_cuda_setting, restore_variables
from memwall.apply.technique import Handler, Target, Zero, register
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.predict.malloc.tensor_heap import MIN_TENSOR_BYTES


@register("allocator")
class ReuseHandler(Handler[AllocatorReuse]):
    """Sets the process's allocator."""

    applies_last = True

    @classmethod
    def absent(cls, target: Target) -> None:
        target.allocator.undo()

    def apply(self, target: Target) -> None:
        if self.action.cuda_setting:
            require_cuda_setting(self.action.cuda_setting)
            target.on_undo(restore_variables)
            return
        target.allocator.apply(self.action.policy, self.action.limit_bytes, self.action.outside_bytes)
        target.on_undo(target.allocator.undo)

    def effect(self, target: Target) -> "AllocatorEffect":
        return AllocatorEffect(self.action, target.allocator)

    def before_cuda(self) -> None:
        if self.action.cuda_setting:
            require_cuda_setting(self.action.cuda_setting)

    def why_not_under_deepspeed(self, zero: Zero) -> str | None:
        return None

    def under_deepspeed(self) -> AllocatorReuse:
        """Leaves the limit out, since buffers of DeepSpeed would count against the heap."""
        return msgspec.structs.replace(self.action, limit_bytes=0, outside_bytes=0)


class AllocatorEffect(Effect):
    """Sees that a tensor made now comes from where the plan has it."""

    def __init__(self, action: AllocatorReuse, allocator: AllocatorHandler) -> None:
        self.name = f"allocator policy {action.policy}"
        self._action, self._allocator = action, allocator
        if action.cuda_setting:
            self.name, self.expected = "allocator setting", f"torch uses {action.cuda_setting}"
        else:
            self.expected = f"tensors from {MIN_TENSOR_BYTES} bytes lie in the tensor heap"

    def is_seen(self) -> bool:
        """Returns whether there is something to see: nothing before CUDA starts."""
        return not self._action.cuda_setting or torch.cuda.is_initialized()

    def contrary(self) -> str:
        if self._action.cuda_setting:
            found = effective_setting() if torch.cuda.is_initialized() else self._action.cuda_setting
            return "" if found == self._action.cuda_setting else f"it uses '{found}'"
        return "" if self._allocator.takes_tensors() else "a new tensor lies elsewhere: another allocator came after"
