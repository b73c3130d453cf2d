"""State of a parameter under `FusedAdamW`: made, told apart, and taken over from a file."""

from typing import Any, Literal

import torch
from torch import Tensor

from memwall.errors import UsageError

from .._rows import compute_dtype
from ._terms import QUANTISED_ELEMENTS

__all__ = [
    "MIN_QUANTISED_ELEMENTS",
    "MIN_QUANTISED_VECTOR",
    "MomentBits",
    "check_fits",
    "is_quantised",
    "loaded_state",
    "new_state",
]

MomentBits = Literal[8, 32]

MIN_QUANTISED_ELEMENTS = 4096
"""A smaller tensor keeps fp32."""
MIN_QUANTISED_VECTOR = 65_536
"""So does a smaller vector: norms and biases, where 8 bits save nothing that counts. A larger one is a flat buffer."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


def is_quantised(state: dict[str, Tensor]) -> bool:
    """Whether the moments have 8 bits."""
    return "exp_avg_unit" in state


def new_state(p: Tensor, bits: MomentBits) -> dict[str, Tensor]:
    """Zeros, laid out as the parameter is.

    Raises:
        UsageError: the parameter has gaps or overlaps in memory.
    """
    quantises = _quantises(p, bits)
    dtypes = (torch.int8, torch.uint8) if quantises else (compute_dtype(p.dtype),) * 2
    state = {"step": torch.zeros((), dtype=torch.float32, device=p.device)}
    for name, dtype in zip(_MOMENTS, dtypes, strict=True):
        state[name] = torch.zeros_like(p, dtype=dtype, requires_grad=False)
    if state["exp_avg"].stride() != p.stride():
        raise UsageError(
            f"FusedAdamW wants parameters without gaps or overlaps in memory, found one of shape {list(p.shape)} with "
            f"strides {list(p.stride())}; train a contiguous copy"
        )
    if quantises:
        for name in _MOMENTS:
            state[f"{name}_unit"] = torch.zeros(_num_blocks(p), dtype=torch.float32, device=p.device)
    return state


def check_fits(p: Tensor, state: dict[str, Tensor]) -> None:
    """That the parameter still lies as its moments do.

    Raises:
        UsageError: it was moved or laid out anew.
    """
    moment = state["exp_avg"]
    if (moment.shape, moment.stride(), moment.device) != (p.shape, p.stride(), p.device):
        raise UsageError(
            f"a parameter of shape {list(p.shape)} has strides {list(p.stride())} on {p.device}, its moments have "
            f"shape {list(moment.shape)} and strides {list(moment.stride())} on {moment.device}; move the model first, "
            "then make the optimizer and load its state"
        )


def loaded_state(p: Tensor, saved: dict[str, Any], bits: MomentBits) -> dict[str, Tensor]:
    """A copy of the saved state on the parameter's device, as `new_state` would have it.

    Raises:
        UsageError: the saved moments have other bits, or a layout that their units do not fit.
    """
    state = new_state(p, bits)
    if saved.keys() != state.keys():
        raise UsageError(
            f"a parameter of shape {list(p.shape)} needs the state {', '.join(state)} with moments of {bits} bits, "
            f"found {', '.join(map(str, saved))}"
        )
    for name, tensor in state.items():
        value = torch.as_tensor(saved[name])
        if value.shape != tensor.shape or value.is_floating_point() != tensor.is_floating_point():
            raise UsageError(
                f"{name} of a parameter of shape {list(p.shape)} must be {list(tensor.shape)} {tensor.dtype}, found "
                f"{list(value.shape)} {value.dtype}"
            )
        if not value.is_floating_point() and value.stride() != tensor.stride():
            raise UsageError(
                f"8-bit moments of a parameter with strides {list(p.stride())} were saved with {list(value.stride())}; "
                "load into the memory format in which they were saved"
            )
        tensor.copy_(value)
    return state


def _quantises(p: Tensor, bits: MomentBits) -> bool:
    smallest = MIN_QUANTISED_ELEMENTS if p.dim() > 1 else MIN_QUANTISED_VECTOR
    return bits == 8 and p.dtype != torch.float64 and p.numel() >= smallest


def _num_blocks(p: Tensor) -> int:
    return -(-p.numel() // QUANTISED_ELEMENTS)
