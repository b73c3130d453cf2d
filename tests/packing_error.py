"""What packing a tensor in a byte an element may lose, and the way back, for the tests of packing and of offload."""

from typing import Literal

import torch
from torch import Tensor

from memwall.triton_kernels.pack import BLOCK_ELEMENTS, Packed, unpack_into

__all__ = ["error_bound", "unpacked"]


def unpacked(packed: Packed, like: Tensor) -> Tensor:
    """Returns the tensor again, contiguous, in the shape and dtype of `like`."""
    result = torch.empty(like.shape, dtype=like.dtype)
    unpack_into(packed, result)
    return result


def error_bound(tensor: Tensor, form: Literal["int8", "fp8"] = "int8") -> Tensor:
    """Returns the most that an element of a finite tensor may be off, before the result is rounded.

    int8: half of a step of 1/127 of the block's largest magnitude. fp8: 1/16 of the element, at least half of the
    smallest step, 2^-10 / 448 of the largest. Both with the rounding of fp32, and with what is below its smallest
    normal number times 448, which becomes 0.
    """
    flat = tensor.detach().double().abs().flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    largest = padded.amax(1, keepdim=True)
    step = largest / 254.0 if form == "int8" else torch.maximum(padded / 16.0, largest * 2.0**-10 / 448.0)
    bound = step + largest * 2.0**-22 + 448.0 * torch.finfo(torch.float32).tiny
    return bound.expand_as(padded).flatten()[: flat.numel()].view(tensor.shape)
