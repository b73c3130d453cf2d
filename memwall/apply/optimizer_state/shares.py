"""Which parameters' state lies in one bucket, and which state stays in memory: shares of an optimizer's state.

Parameters are taken in the optimizer's order. The first ones that fit into the resident bytes stay; the others fill
one bucket after another.
"""

from typing import Any

import torch
from torch import Tensor

from memwall.apply.optimizer_state.partial_step import Part
from memwall.apply.optimizer_state.pinned import PinnedSpace
from memwall.store.buckets import Bucket, DiskSpace, Entry, can_move, padded_bytes

StateSpace = DiskSpace | PinnedSpace
"""Is where an optimizer's state is between steps."""

# State per byte of parameter, where it does not exist yet: two moments, and in some variants a third buffer.
_USUAL_RATIO, _LARGER_RATIO = 2, 3
_CPU = torch.device("cpu")


class StateShare:
    """Lists parameters that are stepped together, and says where their state is between steps."""

    def __init__(self, bucket: Bucket[Any]) -> None:
        self.bucket = bucket
        self.parameters: list[Tensor] = []
        self.state_bytes = 0

    @property
    def has_gradient(self) -> bool:
        """Says whether a step would change anything."""
        return any(parameter.grad is not None for parameter in self.parameters)

    @property
    def key(self) -> tuple[int, ...]:
        """Is the same for shares of the same parameters."""
        return tuple(map(id, self.parameters))


class Shares:
    """Divides the state of one optimizer into shares.

    Args:
        space: has the buckets.
        resident_bytes: state that stays in memory, of the parameters that come first.
        bucket_bytes: state of so many parameters is one share. A parameter with more is a share by itself.
        min_bytes: smaller tensors of state stay in memory besides.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        space: StateSpace,
        *,
        resident_bytes: int,
        bucket_bytes: int,
        min_bytes: int,
    ) -> None:
        self._optimizer, self._space = optimizer, space
        self.bucket_bytes, self._min_bytes = bucket_bytes, min_bytes
        self.resident_left_bytes = resident_bytes
        """Counts what may stay and is not taken yet."""
        self.every: list[StateShare] = []
        self._share_of: dict[Tensor, StateShare | None] = {}

    def adopt(self) -> None:
        """Gives every parameter that has no place yet one, in the optimizer's order."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter not in self._share_of:
                    num_bytes = expected_state_bytes(
                        self._optimizer, parameter, group, self._min_bytes, self._space.device
                    )
                    self._share_of[parameter] = self._place_of(parameter, num_bytes)

    def parts(self) -> dict[StateShare | None, Part]:
        """Says for each share which parameters of which of the optimizer's groups it steps, in their order."""
        parts: dict[StateShare | None, dict[int, list[Tensor]]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for parameter in group["params"]:
                parts.setdefault(self._share_of[parameter], {}).setdefault(number, []).append(parameter)
        return {share: tuple(groups.items()) for share, groups in parts.items()}

    def entries(self, share: StateShare) -> list[Entry]:
        """Returns where a share's state holds tensors that may leave memory."""
        return [
            entry
            for parameter in share.parameters
            for entry in state_entries(self._optimizer, parameter, self._min_bytes, self._space.device)
        ]

    def _place_of(self, parameter: Tensor, num_bytes: int) -> StateShare | None:
        """Returns the share that takes a parameter; None where its state stays in memory."""
        if num_bytes <= self.resident_left_bytes:
            self.resident_left_bytes -= num_bytes
            return None
        if not self.every or self.every[-1].state_bytes + num_bytes > self.bucket_bytes:
            label = f"bucket {len(self.every)} of the {type(self._optimizer).__name__}'s state"
            self.every.append(StateShare(self._space.bucket(label)))
        self.every[-1].parameters.append(parameter)
        self.every[-1].state_bytes += num_bytes
        return self.every[-1]


def state_entries(
    optimizer: torch.optim.Optimizer, parameter: Tensor, min_bytes: int, device: torch.device = _CPU
) -> list[Entry]:
    """Returns where the state of a parameter holds tensors that are in a device's memory and may leave it."""
    state = optimizer.state.get(parameter)
    if not isinstance(state, dict):
        return []
    dense = (tensor for tensor in (parameter, parameter.grad) if tensor is not None and tensor.layout is torch.strided)
    kept = {tensor.data_ptr() for tensor in dense}
    found: list[Entry] = []
    for key, value in state.items():
        if can_move(value, min_bytes, device) and value.data_ptr() not in kept:
            kept.add(value.data_ptr())  # held under a second key, it stays there
            found.append((state, key))
    return found


def expected_state_bytes(
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    group: dict[str, Any],
    min_bytes: int,
    device: torch.device = _CPU,
) -> int:
    """Returns the bytes of state that may leave memory: what there is, or what such optimizers usually make."""
    state = optimizer.state.get(parameter)
    if state:
        here = [holder[key] for holder, key in state_entries(optimizer, parameter, min_bytes, device)]
        away = [value for value in state.values() if isinstance(value, Tensor) and value.is_meta]
        return padded_bytes(tensor.numel() * tensor.element_size() for tensor in (*here, *away))
    ratio = _LARGER_RATIO if group.get("amsgrad") or group.get("centered") else _USUAL_RATIO
    num_bytes = parameter.numel() * parameter.element_size()
    return 0 if num_bytes < min_bytes else num_bytes * ratio
