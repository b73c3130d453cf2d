"""Allocator reuse: how freed memory is kept or returned, on a CPU by a heap or thresholds, on CUDA by a setting."""

import ctypes

import msgspec
import torch

from memwall.apply.effect import Effect
from memwall.apply.memory.allocator import AllocatorHandler
from memwall.apply.memory.cuda_setting import effective_setting, require_cuda_setting, restore_variables
from memwall.apply.technique import Handler, Target, Zero, register
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.predict.malloc.malloc_policies import policy_named
from memwall.predict.malloc.tensor_heap import MIN_TENSOR_BYTES
from memwall.predict.process import TENSOR_HEAP

# Another thread may free a block between two looks.
_NUM_LOOKS = 8


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
        elif action.policy == TENSOR_HEAP:
            self.expected = f"tensors from {MIN_TENSOR_BYTES} bytes lie in the tensor heap"
        else:
            threshold_bytes = policy_named(action.policy).mmap_threshold_bytes
            self.expected = f"tensors from {threshold_bytes} bytes have a mapping of their own"

    def is_seen(self) -> bool:
        """Returns whether there is something to see: nothing before CUDA starts."""
        return not self._action.cuda_setting or torch.cuda.is_initialized()

    def contrary(self) -> str:
        if self._action.cuda_setting:
            found = effective_setting() if torch.cuda.is_initialized() else self._action.cuda_setting
            return "" if found == self._action.cuda_setting else f"it uses '{found}'"
        if self._action.policy == TENSOR_HEAP:
            return (
                "" if self._allocator.takes_tensors() else "a new tensor lies elsewhere: another allocator came after"
            )
        threshold_bytes = policy_named(self._action.policy).mmap_threshold_bytes
        if threshold_bytes is None or _maps_alone(2 * threshold_bytes):
            return ""
        return "a new tensor lies in malloc's heap: the threshold was set again, or another malloc is in use"


class _MallocInfo(ctypes.Structure):
    """Mirrors struct mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _maps_alone(num_bytes: int) -> bool:
    """Returns whether new tensors get a mapping of their own; True where the C library (glibc < 2.33) does not say.

    malloc looks among what it has free before it maps anything, whatever the threshold. So there are as many tensors as
    that could hold, and then some; their pages are never touched.
    """
    look = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if look is None:
        return True
    look.restype = _MallocInfo
    for _ in range(_NUM_LOOKS):
        before = look()
        held: list[torch.Tensor] = []
        while len(held) * num_bytes <= before.fordblks + num_bytes:
            held.extend(torch.empty(num_bytes, dtype=torch.uint8) for _ in range(len(held) or 1))
            if look().hblks > before.hblks:
                return True
    return False
