"""A moment in 8 bits, torchao's `OptimState8bit`, as the plain tensors that it consists of, and made of them again.

A commit writes those as they lie: put together again they are the same moment, while one that went through float32
would be rounded once more. To open them takes no torchao.
"""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from memwall.errors import ApplyError
from memwall.predict.low_bit_moments import SLICE_ELEMENTS

_MODULE = "torchao.optim.subclass_8bit"
_PIECES = ("codes", "scale", "qmap")
"""Names attributes: uint8 in the moment's shape; a float32 for each block of elements; the float32 of each code."""


def load_torchao() -> Any:
    """Returns the class of torchao's that holds a tensor in 8 bits.

    Raises:
        ApplyError: torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise ApplyError("optimizer state in 8 bits is kept by torchao, which is not installed: pip install torchao")
    from torchao.optim.subclass_8bit import OptimState8bit

    return OptimState8bit


def is_low_bit(value: object) -> bool:
    """Returns whether a value of an optimizer's state is in 8 bits; without torchao's module loaded there is none."""
    module = sys.modules.get(_MODULE)
    return module is not None and type(value) is module.OptimState8bit


def pieces_of(key: str, moment: Any) -> dict[str, Tensor]:
    """Returns the plain tensors of a moment, under keys made of its own; they share its memory."""
    return {f"{key}.{piece}": getattr(moment, piece) for piece in _PIECES}


def facts_of(moment: Any) -> dict[str, Any]:
    """Returns what of a moment is no tensor."""
    return {"signed": moment.signed, "dtype": moment.dtype}


def put_together(state: dict[Any, Any], facts: Mapping[str, Mapping[str, Any]], *, is_kept: bool) -> None:
    """Replaces the pieces in a parameter's state by the moments they are of.

    Args:
        facts: `facts_of` each moment, by key.
        is_kept: in 8 bits; opened, into the dtype that it shows, if not.

    Raises:
        ApplyError: they are to be in 8 bits, and torchao is not installed.
    """
    for key, known in facts.items():
        codes, scales, table = (state.pop(f"{key}.{piece}") for piece in _PIECES)
        if is_kept:
            state[key] = load_torchao()(codes, scales, table, known["signed"], known["dtype"])
        else:
            state[key] = opened(codes, scales, table).to(known["dtype"])


def opened(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Returns a moment in float32, in the shape of its codes; a slice's worth of temporaries at a time."""
    whole = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    block_elements = codes.numel() // scales.numel()
    num_blocks = max(1, SLICE_ELEMENTS // block_elements)
    blocks = zip(
        whole.view(-1, block_elements).split(num_blocks),
        codes.reshape(-1, block_elements).split(num_blocks),
        scales.split(num_blocks),
        strict=True,
    )
    for part, part_codes, part_scales in blocks:
        torch.mul(table[part_codes.int()], part_scales.unsqueeze(-1), out=part)
    return whole
