"""Time of operations on the phantom device's clock, by what they compute and move: PHANTOM_TIME=roofline. Simulated.

An operation takes the longer of its arithmetic at the card's peak rate for its dtype, and of reading and writing its
tensors once at the card's peak bandwidth, both from memwall/data/hardware.toml; never less than PHANTOM_KERNEL_NS. No
kernel reaches both: what this is for is who waits for whom, which copies a computation hides, and what an order costs.
"""

import ctypes
import os
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from phantom.numerics import keep
from phantom.queued import library

__all__ = ["install"]

_HARDWARE = Path(__file__).resolve().parents[1] / "memwall" / "data" / "hardware.toml"
_RATES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class RooflineTime(TorchDispatchMode):
    """Tells the device how long the kernels of each operation take together."""

    def __init__(self, card: str) -> None:
        super().__init__()
        figures = tomllib.loads(_HARDWARE.read_text(encoding="utf-8"))["devices"][card]
        self._bytes_per_second: float = figures["memory_bytes_per_second"]
        self._flops_per_second: dict[str, float] = figures["flops"]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out, ns = None, 0
        library.phantom_begin_operation()
        try:
            out = func(*args, **kwargs)
            tensors = [t for t in tree_flatten((args, kwargs, out))[0] if isinstance(t, Tensor) and t.is_cuda]
            if tensors and not func.is_view:
                ns = round(1e9 * self._seconds(func, args, kwargs, out, tensors))
        finally:
            library.phantom_end_operation(ctypes.c_int64(ns), str(func.name()).encode())
        return out

    def _seconds(self, func: Any, args: Any, kwargs: Any, out: Any, tensors: Sequence[Tensor]) -> float:
        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
        dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.float32)
        name = _RATES.get(dtype, "float32")
        if name == "float32" and torch.backends.cuda.matmul.allow_tf32:
            name = "tf32"
        rate = self._flops_per_second.get(name, self._flops_per_second["float32"])
        return max(flops / rate, _moved_bytes(func, args, kwargs, tensors) / self._bytes_per_second)


def _moved_bytes(func: Any, args: Any, kwargs: Any, tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of all tensors that an operation has to do with, of those that it changes in place twice."""
    found = {id(tensor): _bytes(tensor) for tensor in tensors}
    written = 0
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            written += sum(_bytes(each) for each in tree_flatten(value)[0] if isinstance(each, Tensor))
    return sum(found.values()) + written


def _bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor; what is expanded is read once."""
    if not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def install() -> None:
    """Gives operations times from here on; before values are installed, whose queue comes after an operation's time."""
    keep(RooflineTime(os.environ.get("PHANTOM_CARD") or "h100-80gb"))
