"""CPU tensors over memory that is not theirs: that of a phantom device, or of pinned pages of the host."""

import ctypes

import torch
from torch import Tensor

__all__ = ["laid_over"]


def laid_over(tensor: Tensor) -> Tensor:
    """Returns a CPU tensor over the memory of a tensor, which it does not keep alive."""
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_uint8 * num_bytes).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype)
    made.set_(raw.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    if tensor.is_neg():
        made = torch._neg_view(made)
    return made.conj() if tensor.is_conj() else made
