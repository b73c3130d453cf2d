"""Where a kernel runs: on the GPU, in Triton's interpreter, or not at all (then the torch reference does)."""

import importlib
import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


@cache
def is_interpreting() -> bool:
    """Tells whether Triton runs kernels on the CPU, which it decides for good when a kernel is decorated."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@cache
def _is_triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(tensor: torch.Tensor) -> bool:
    """Tells whether the Triton kernel, not the reference, is to work on this tensor."""
    # Kernels compute in fp32: fp64, which only tests and finite differences use, belongs to the reference.
    if tensor.dtype == torch.float64 or not _is_triton_installed():
        return False
    return tensor.device.type == "cuda" or (is_interpreting() and tensor.device.type == "cpu")


def half_for(tensor: torch.Tensor, package: str | None, name: str) -> Callable[..., None]:
    """Returns what does `name` to this tensor: the Triton half, whose module is loaded now, or the plain torch half.

    Args:
        package: of the operation.
    """
    module, prefix = ("_kernel", "launch") if runs_triton(tensor) else ("_reference", "reference")
    found: Callable[..., Any] = getattr(importlib.import_module(f".{module}", package), f"{prefix}_{name}")
    return found


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, onto which Triton launches whatever its arguments are."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else nullcontext()


def warp_size(tensor: torch.Tensor) -> int:
    """Returns the lanes of a warp: 64 on AMD's data centre cards, 32 elsewhere."""
    if tensor.device.type == "cuda" and torch.version.hip is not None:
        return int(torch.cuda.get_device_properties(tensor.device).warp_size)
    return 32
