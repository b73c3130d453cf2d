"""The bytes that the backward of fused attention allocates for itself, as formulas over its arguments.

Only what torch's own source allocates through the caching allocator, read there, in code that is compiled for CUDA
alone; each formula names the place. What cuDNN asks for beyond its front end's own buffers is not here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.torch_internals.operators import operator_named
from memwall.trace.workspaces import AheadOfResults

Capability = tuple[int, int]

_FLOAT_BYTES = 4
# mem_eff_attention/kernel_backward.h, `GradQTempStorage`: lock, counter and padding before each tile.
_TILE_HEAD_BYTES = 16


def _flash_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Sums the query's gradient and the softmax in float32; with grouped queries has a gradient per query head.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.
    """
    grad_out, query, key, _, out = args[:5]
    batch, heads, tokens, size = query.shape
    rows = _FLOAT_BYTES * batch * heads * _up(tokens, 128)
    blocks: tuple[int, ...] = (rows, rows * _up(size, 32))
    if key.shape[1] != heads:
        blocks += (batch * heads * key.shape[2] * size * query.element_size(),) * 2
    return _copy(grad_out) + _copy(out) + blocks


def _efficient_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Sums the query's gradient in float32 tiles, a number per row; float32 first multiplies gradient and output.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`;
    mem_eff_attention/kernel_backward.h, `workspace_size`.
    """
    grad_out, query, _, value = args[:4]
    batch, heads, tokens, size = query.shape
    rows = _FLOAT_BYTES * batch * heads * tokens
    tall, wide = _tile(device.capability, size, is_half=query.dtype != torch.float32)
    num_tiles = batch * heads * -(-tokens // tall) * -(-size // wide)
    blocks: list[tuple[int, ...]] = [(rows,)]
    if device.capability >= (7, 0):  # split keys, and with them sums in memory
        blocks = [(rows, num_tiles * (_TILE_HEAD_BYTES + _FLOAT_BYTES * tall * wide))]
    if query.dtype == torch.float32:  # the sums over a product's rows, and these in the order that the kernel reads
        blocks.append((rows * value.shape[3], rows, rows))
    return _copy(grad_out) + max(blocks, key=sum)


def _tile(capability: Capability, size: int, *, is_half: bool) -> tuple[int, int]:
    """Returns rows and columns of a tile: the first kernel of kernels/cutlassB.h that takes heads of this size.

    Large tiles of half precision need more shared memory than sm86, sm89 and sm12x have.
    """
    has_little = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    if size <= 64 or capability < (8, 0) or (is_half and has_little and size <= 128):
        return 64, 64
    return (128, 128) if is_half and size <= 128 else (128, 64)


def _cudnn_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Sums the query's gradient and the softmax in float32, in the front end.

    Source: NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h, `SDPABackwardNode`: dQ_accum, softmax_sum.
    """
    batch, heads, tokens, size = args[1].shape
    return (_FLOAT_BYTES * batch * heads * tokens * (size + 1),)


def _copy(tensor: Tensor) -> tuple[int, ...]:
    """Returns the bytes of a copy, made where [batch, tokens, heads, size] is not how the tensor lies in memory."""
    is_there = tensor.transpose(1, 2).is_contiguous()
    return () if is_there else (AheadOfResults(tensor.numel() * tensor.element_size()),)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _attention_backward(kernel: str) -> Any:
    return operator_named(f"_scaled_dot_product_{kernel}_attention_backward.default")


ATTENTION_FORMULAS: dict[Any, Callable[[CudaDevice, tuple[Any, ...], dict[str, Any]], tuple[int, ...]]] = {
    _attention_backward("flash"): _flash_backward,
    _attention_backward("efficient"): _efficient_backward,
    _attention_backward("cudnn"): _cudnn_backward,
}
"""Functions by operator: called with its arguments, each returns the bytes of each block."""
