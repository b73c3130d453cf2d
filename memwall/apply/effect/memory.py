"""The allocator's setting and the place of the optimizer's state: seen by looking at the process itself."""

import ctypes
from collections.abc import Callable

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from memwall.apply.allocator import AllocatorHandler
from memwall.apply.cuda_setting import effective_setting
from memwall.apply.optimizer_state.keeper import StateKeeper
from memwall.errors import NoEffectError
from memwall.planning.techniques.allocator import AllocatorReuse
from memwall.planning.techniques.cpu_step import StepOnCpu
from memwall.planning.techniques.low_bit_state import LowBitState
from memwall.planning.techniques.optimizer_state import OptimizerPlacement
from memwall.predict.malloc.policies import policy_named
from memwall.predict.malloc.tensor_heap import MIN_TENSOR_BYTES
from memwall.predict.process import TENSOR_HEAP
from memwall.units import format_bytes

__all__ = ["AllocatorEffect", "LowBitEffect", "PlacementEffect"]

# Another thread may free a block between two looks.
_NUM_LOOKS = 8


class AllocatorEffect:
    """A tensor made now comes from where the plan has it."""

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
        """See `Effect`. Before CUDA starts there is nothing to see."""
        return not self._action.cuda_setting or torch.cuda.is_initialized()

    def contrary(self) -> str:
        """See `Effect`."""
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

    def close(self) -> None:
        """See `Effect`."""


class PlacementEffect:
    """State of the optimizer that steps is on disk between steps."""

    def __init__(
        self,
        action: OptimizerPlacement | StepOnCpu,
        model: nn.Module,
        keeper: StateKeeper,
        optimizer: Callable[[], torch.optim.Optimizer | None],
    ) -> None:
        if isinstance(action, StepOnCpu):
            self._tier, self._resident_bytes = "host", 0
            self.name = "the optimizer's step on the CPU"
            self.expected = "its state is in host memory, where the CPU steps it"
        else:
            self._tier, self._resident_bytes = action.tier, action.resident_bytes
            self.name = f"optimizer state on the {action.tier}"
            self.expected = f"between steps no more than {format_bytes(action.resident_bytes)} of state are in memory"
        self._action, self._keeper, self._optimizer = action, keeper, optimizer
        self._trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
        self._num_foreign = 0
        """Steps of another optimizer since the last one of this."""
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def is_seen(self) -> bool:
        """See `Effect`."""
        return self._keeper.away_bytes > 0

    def contrary(self) -> str:
        """See `Effect`."""
        optimizer = self._optimizer()
        if optimizer is None or self._keeper.away_bytes:
            return ""
        present_bytes = sum(
            value.numel() * value.element_size()
            for state in optimizer.state.values()
            for value in (state.values() if isinstance(state, dict) else ())
            if isinstance(value, torch.Tensor) and value.numel() * value.element_size() >= self._action.min_bytes
        )
        if present_bytes <= self._resident_bytes:
            return ""
        return (
            f"{format_bytes(present_bytes)} of the {type(optimizer).__name__}'s state are in memory and nothing is on "
            f"the {self._tier}: its tensors are of a kind that cannot be moved"
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Of every optimizer of the process: a session hears of its own alone.

        Raises:
            NoEffectError: another one trains the model.
        """
        own = self._optimizer()
        if own is None or optimizer is own:
            self._num_foreign = 0
        elif any(id(p) in self._trained for group in optimizer.param_groups for p in group["params"]):
            self._num_foreign += 1
            if self._num_foreign == 2:
                raise NoEffectError(
                    action=self.name,
                    expected=self.expected,
                    found=f"another optimizer ({type(optimizer).__name__}) trains the model than the "
                    f"{type(own).__name__} this session was given",
                )

    def close(self) -> None:
        """See `Effect`."""
        self._handle.remove()


class LowBitEffect:
    """Moments of the optimizer that steps are in 8 bits between steps."""

    def __init__(
        self, action: LowBitState, keeper: StateKeeper, optimizer: Callable[[], torch.optim.Optimizer | None]
    ) -> None:
        self.name = f"optimizer state in {action.bits} bits"
        self.expected = "between steps moments are in a byte an element"
        self._keeper, self._optimizer = keeper, optimizer

    def is_seen(self) -> bool:
        """See `Effect`."""
        return self._keeper.num_low_bit > 0

    def contrary(self) -> str:
        """See `Effect`."""
        optimizer = self._optimizer()
        if optimizer is None or not optimizer.state or self._keeper.num_low_bit:
            return ""
        return (
            f"no moment of the {type(optimizer).__name__} is: its parameters are not in float32, lie with gaps or in "
            "another order in memory, or have less than 4,096 elements or no whole number of blocks of 256"
        )

    def close(self) -> None:
        """See `Effect`."""


class _MallocInfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def _maps_alone(num_bytes: int) -> bool:
    """Whether new tensors get a mapping of their own; True where the C library does not say (before glibc 2.33).

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
