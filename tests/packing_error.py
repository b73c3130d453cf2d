"""What packing a tensor in a byte an element may lose, and the way back, for the tests of packing and of offload."""

import torch
from torch import Tensor

from memwall.triton_kernels.pack import BLOCK_ELEMENTS, Packed, unpack_into

__all__ = ["error_bound", "unpacked"]


def unpacked(packed: Packed, like: Tensor) -> Tensor:
    """Returns the tensor again, contiguous, in the shape and dtype of `like`."""
    result = torch.empty(like.shape, dtype=like.dtype)
    unpack_into(packed, result)
    return result


def error_bound(tensor: Tensor) -> Tensor:
    """Returns the most that an element of a finite tensor may be off, before the result is rounded.

    Half of a step of 1/127 of the block's largest magnitude, with the rounding of fp32, and with what is below its
    smallest normal number times 127, which becomes 0.
    """
    flat = tensor.detach().double().abs().flatten()
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK_ELEMENTS)).view(-1, BLOCK_ELEMENTS)
    largest = padded.amax(1, keepdim=True)
    bound = largest / 254.0 + largest * 2.0**-22 + 127.0 * torch.finfo(torch.float32).tiny
    return bound.expand_as(padded).flatten()[: flat.numel()].view(tensor.shape)
