"""`pack` and `unpack` as custom operators, so that torch.compile sees them whole and fake tensors can run them."""

from typing import Any

import torch
from torch import Tensor

from .._launch import runs_triton
from .._rows import as_rows, compute_dtype
from ._terms import BLOCK_ELEMENTS, CODE_DTYPES

__all__ = ["pack_op", "packer", "unpack_op", "unpacker"]


@torch.library.custom_op("memwall::pack", mutates_args=())
def pack_op(tensor: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Codes [elements] and units [blocks]."""
    codes, units = _empty(tensor, form)
    if tensor.numel() > 0:
        packer(tensor)(as_rows(tensor) if tensor.dim() > 0 else tensor.view(1, 1), codes, units, form)
    return codes, units


@pack_op.register_fake
def _(tensor: Tensor, form: str) -> tuple[Tensor, Tensor]:
    return _empty(tensor, form)


@torch.library.custom_op("memwall::unpack", mutates_args=())
def unpack_op(codes: Tensor, units: Tensor, dtype: torch.dtype) -> Tensor:
    """Elements in `dtype`."""
    result = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel() > 0:
        unpacker(result)(codes, units, result)
    return result


@unpack_op.register_fake
def _(codes: Tensor, units: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(codes.shape, dtype=dtype, device=codes.device)


def _empty(tensor: Tensor, form: str) -> tuple[Tensor, Tensor]:
    num_elements = tensor.numel()
    num_blocks = -(-num_elements // BLOCK_ELEMENTS)
    return (
        torch.empty(num_elements, dtype=CODE_DTYPES[form], device=tensor.device),
        torch.empty(num_blocks, dtype=compute_dtype(tensor.dtype), device=tensor.device),
    )


def packer(tensor: Tensor) -> Any:
    """What fills codes and units on the tensor's device: (tensor [rows, columns], codes, units, form)."""
    if runs_triton(tensor):
        from ._kernel import launch_pack

        return launch_pack
    from ._reference import reference_pack

    return reference_pack


def unpacker(result: Tensor) -> Any:
    """What fills a result on its device: (codes, units, result)."""
    if runs_triton(result):
        from ._kernel import launch_unpack

        return launch_unpack
    from ._reference import reference_unpack

    return reference_unpack
