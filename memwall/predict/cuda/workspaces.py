"""The bytes that CUDA operators allocate for themselves while they run, as formulas over their arguments.

Only what torch's own source allocates through the caching allocator, read there; each formula names the place. What a
closed library asks for (cuDNN's convolutions, its attention beyond the front end's own buffers) is not here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memwall.torch_internals.operators import operator_named
from memwall.trace.op_work import own_work_of
from memwall.trace.workspaces import Workspace, Workspaces

__all__ = ["CudaWorkspaces"]

Capability = tuple[int, int]
Formula = Callable[[Capability, tuple[Any, ...]], int]

_FLOAT_BYTES, _INDEX_BYTES = 4, 8
# Up to so many indices, one kernel without temporaries: Embedding.cu, `embedding_dense_backward_cuda`.
_FEW_INDICES = 3072
# EmbeddingBackwardKernel.cu, `NROWS_PER_THREAD`.
_ROWS_PER_THREAD = 10
# mem_eff_attention/kernel_backward.h, `GradQTempStorage`: lock, counter and padding before each tile.
_TILE_HEAD_BYTES = 16

_aten = torch.ops.aten


class CudaWorkspaces(Workspaces):
    """Knows the workspaces of a device that is not here.

    Args:
        capability: the device's compute capability.
        is_rocm: whether torch runs its ROCm kernels there, whose attention is another.
    """

    def __init__(self, capability: Capability, *, is_rocm: bool) -> None:
        super().__init__(is_available=False)
        self._capability = capability
        self._formulas = FORMULAS if is_rocm else FORMULAS | ATTENTION_FORMULAS

    @contextmanager
    def measuring(
        self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Workspace]:
        """Runs a fake operator; its workspace follows from its arguments."""
        formula = self._formulas.get(func)
        num_bytes = own_work_of(func, args).workspace_bytes if formula is None else formula(self._capability, args)
        yield Workspace(num_bytes)


def _flash_backward(capability: Capability, args: tuple[Any, ...]) -> int:
    """Sums the query's gradient and the softmax in float32; with grouped queries has a gradient per query head.

    Source: aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, `mha_bwd`.
    """
    grad_out, query, key, _, out = args[:5]
    batch, heads, tokens, size = query.shape
    tokens_up, size_up = _up(tokens, 128), _up(size, 32)
    num_bytes: int = _FLOAT_BYTES * batch * heads * tokens_up * (size_up + 1)
    if key.shape[1] != heads:
        num_bytes += 2 * batch * heads * key.shape[2] * size * query.element_size()
    return num_bytes + _copy_bytes(grad_out) + _copy_bytes(out)


def _efficient_backward(capability: Capability, args: tuple[Any, ...]) -> int:
    """Sums the query's gradient in float32 tiles, a number per row; float32 first multiplies gradient and output.

    Source: aten/src/ATen/native/transformers/cuda/attention_backward.cu, `_efficient_attention_backward`;
    mem_eff_attention/kernel_backward.h, `workspace_size`.
    """
    grad_out, query, _, value = args[:4]
    batch, heads, tokens, size = query.shape
    rows = batch * heads * tokens
    tall, wide = _tile(capability, size, is_half=query.dtype != torch.float32)
    num_tiles = batch * heads * -(-tokens // tall) * -(-size // wide)
    # Split keys, and with them sums in memory, from sm70 on.
    tiles_bytes = num_tiles * (_TILE_HEAD_BYTES + _FLOAT_BYTES * tall * wide) if capability >= (7, 0) else 0
    num_bytes: int = _FLOAT_BYTES * rows + tiles_bytes
    if query.dtype == torch.float32:
        num_bytes = max(num_bytes, _FLOAT_BYTES * rows * (value.shape[3] + 1))
    return num_bytes + _copy_bytes(grad_out)


def _tile(capability: Capability, size: int, *, is_half: bool) -> tuple[int, int]:
    """Returns rows and columns of a tile: the first kernel of kernels/cutlassB.h that takes heads of this size.

    Large tiles of half precision need more shared memory than sm86, sm89 and sm12x have.
    """
    has_little = (8, 6) <= capability <= (8, 9) or capability >= (12, 0)
    if size <= 64 or capability < (8, 0) or (is_half and has_little and size <= 128):
        return 64, 64
    return (128, 128) if is_half and size <= 128 else (128, 64)


def _cudnn_backward(capability: Capability, args: tuple[Any, ...]) -> int:
    """Sums the query's gradient and the softmax in float32, in the front end.

    Source: NVIDIA/cudnn-frontend, scaled_dot_product_flash_attention.h, `SDPABackwardNode`: dQ_accum, softmax_sum.
    """
    batch, heads, tokens, size = args[1].shape
    num_bytes: int = _FLOAT_BYTES * batch * heads * tokens * (size + 1)
    return num_bytes


def _embedding_backward(capability: Capability, args: tuple[Any, ...]) -> int:
    """Sorts indices, and holds their segments and a float32 row per partial segment.

    Source: aten/src/ATen/native/cuda/Embedding.cu, `embedding_dense_backward_cuda`; EmbeddingBackwardKernel.cu.
    """
    grad, indices, num_weights, _, scales_by_frequency = args[:5]
    num_indices, width = indices.numel(), grad.shape[-1]
    copy_bytes = 0 if grad.is_contiguous() else grad.numel() * grad.element_size()
    if num_indices <= _FEW_INDICES and not scales_by_frequency:
        return copy_bytes
    index_bytes = indices.element_size()
    num_segments = min(num_indices, num_weights)
    num_partial = num_indices // _ROWS_PER_THREAD + num_segments
    sum_bytes = num_partial * width * max(grad.element_size(), _FLOAT_BYTES)
    held_bytes = (3 if scales_by_frequency else 2) * num_indices * index_bytes
    segment_bytes = (num_indices + 2 * num_segments + num_partial) * index_bytes
    return int(copy_bytes + max(3 * num_indices * index_bytes, held_bytes + segment_bytes + sum_bytes))


def _index_put(capability: Capability, args: tuple[Any, ...]) -> int:
    """Sorts positions to add up what falls on the same place: four numbers for each.

    Source: aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    indices, values = args[1], args[2]
    if not (len(args) > 3 and args[3]):  # only accumulation sorts
        return 0
    shapes = [index.shape for index in indices if index is not None and index.dtype != torch.bool]
    num_indices = int(torch.Size(torch.broadcast_shapes(*shapes)).numel()) if shapes else 0
    copy_bytes = 0 if values.is_contiguous() else values.numel() * values.element_size()
    return 4 * _INDEX_BYTES * num_indices + copy_bytes


def _copy_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a copy, made where [batch, tokens, heads, size] is not how the tensor lies in memory."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.numel() * tensor.element_size()


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _attention_backward(kernel: str) -> Any:
    return operator_named(f"_scaled_dot_product_{kernel}_attention_backward.default")


ATTENTION_FORMULAS: dict[Any, Formula] = {
    _attention_backward("flash"): _flash_backward,
    _attention_backward("efficient"): _efficient_backward,
    _attention_backward("cudnn"): _cudnn_backward,
}
"""By operator; read in code that is compiled for CUDA alone."""
FORMULAS: dict[Any, Formula] = {
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    operator_named("_index_put_impl_.default"): _index_put,
}
