"""A tensor on the meta device that stands for one whose bytes are in a bucket, and can be asked to move by a framework.

Lightning moves what `optimizer.state` holds when a run ends, past `state_dict`: to where it is used already, or from a
device to the host's memory.
"""

import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class _Holder(Protocol):
    home: torch.device
    """Where its tensors are used."""

    def copies(self, device: torch.device | None = None) -> dict[int, Tensor]:
        """Returns what is away, by the id of what stands in its place."""


class AwayTensor(Tensor):
    """Raises when its elements are read, as every tensor without memory; `to` knows where they are."""

    __torch_function__ = nn.Parameter.__torch_function__  # the plain operations, without a wrapper around results
    _holder: "weakref.ref[Any]"

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """Returns itself where it is to be where it is used already, else a tensor of its own with the elements."""
        place, holder = kwargs.get("device", args[0] if args else None), self._holder()
        if holder is None or not isinstance(place, (str, int, torch.device)):
            return super().to(*args, **kwargs)
        is_plain = len(args) <= 1 and kwargs.keys() <= {"device", "non_blocking"}
        if is_plain and torch.device(place).type == holder.home.type:
            return self
        found = holder.copies(torch.device(place)).get(id(self))
        return super().to(*args, **kwargs) if found is None else found.to(*args, **kwargs)


def away_like(tensor: Tensor, holder: _Holder) -> Tensor:
    """Returns what stands in a tensor's place while a holder has its elements; it does not keep that alive."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    away = empty.as_subclass(AwayTensor)
    away._holder = weakref.ref(holder)
    return away
