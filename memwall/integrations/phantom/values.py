"""Follows small values on a phantom device, all of whose memory reads as 0: those that fake tensors would have, too."""

from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.dispatch import without_dispatch
from memwall.torch_internals.fake import DynamicOutputShapeException
from memwall.torch_internals.trees import tree_flatten
from memwall.trace.fakes.fake_values import KnownValues

_INDEX = torch.ops.aten.index.Tensor
_MASKS = (torch.bool, torch.uint8)


class DeviceValues(KnownValues):
    """Lets a workload ask for tensors on the device; what is known of them is computed on this CPU."""

    def _check_device(self, device: torch.device | None) -> None:
        pass

    def _value(self, tensor: Any) -> Any:
        if isinstance(tensor, torch.device):
            return torch.device("cpu")
        if isinstance(tensor, torch.Generator):  # the device's: any number will do
            return None
        return super()._value(tensor)


class PhantomValues(DeviceValues):
    """Lies between the recorder and the device, which computes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tree_flatten((args, kwargs or {}))[0]
        if not any(_is_on_device(value) for value in given):  # this CPU computes it
            return func(*args, **(kwargs or {}))
        known = [self.value_of(value) for value in given if isinstance(value, Tensor) and value.is_cuda]
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(out, Tensor) and not out.is_cuda and len(known) == 1 and known[0] is not None:
            with without_dispatch():
                out.copy_(known[0])  # a copy to the host
        return out

    def _is_followed(self, tensor: Any) -> bool:
        return isinstance(tensor, Tensor) and tensor.is_cuda

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_lookup = func is _INDEX and not any(each is not None and each.dtype in _MASKS for each in args[1])
        if torch.Tag.dynamic_output_shape in func.tags and not is_lookup:
            raise DynamicOutputShapeException(func)
        return func(*args, **kwargs)

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any, written: list[Tensor]) -> None:
        try:
            super()._follow(func, args, kwargs, out, written)
        except (KeyError, RuntimeError):  # an argument has another storage now, or only the device has the operator
            self.forget(written)

    def _empty(self, real: Tensor) -> Tensor:
        return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="cuda")


def _is_on_device(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.is_cuda) or (isinstance(value, torch.device) and value.type == "cuda")
