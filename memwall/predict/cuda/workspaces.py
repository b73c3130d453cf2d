"""The bytes that CUDA operators allocate for themselves while they run, as formulas over their arguments.

Only what torch's own source allocates through the caching allocator, read there; each formula names the place. What a
closed library asks for (cuDNN's convolutions, its attention beyond the front end's own buffers) is not here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from memwall.predict.cuda.cublas import PRODUCT_FORMULAS
from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.predict.cuda.recurrent_memory import PIECE_FORMULAS, RECURRENT_FORMULAS, RECURRENT_PIECES, in_order
from memwall.predict.cuda.reducing_operators import REDUCING_FORMULAS
from memwall.torch_internals.operators import operator_named
from memwall.trace.op_work import own_work_of
from memwall.trace.workspaces import AheadOfResults, Workspace, Workspaces

Capability = tuple[int, int]
_FLOAT_BYTES, _INDEX_BYTES = 4, 8
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


Formula = Callable[[CudaDevice, tuple[Any, ...], dict[str, Any]], tuple[int, ...]]

# Up to so many indices, one kernel without temporaries: Embedding.cu, `embedding_dense_backward_cuda`.
_FEW_INDICES = 3072
# EmbeddingBackwardKernel.cu, `NROWS_PER_THREAD`.
_ROWS_PER_THREAD = 10
# Segments to a multiprocessor below which, and partial segments to a segment above which, segments count as few and
# long: seen with torch 2.13 on 132 multiprocessors, from 528 rows on and up to 10 * 3 indices for each row.
_SEGMENTS_EACH, _PARTIAL_EACH = 4, 3
# Keys that one block of threads sorts, by major compute capability, as seen with torch 2.13; from 9 on the same.
_SORT_TILE = {7: 2816, 8: 3840, 9: 4608}

_aten = torch.ops.aten


class CudaWorkspaces(Workspaces):
    """Knows the workspaces of a device that is not here."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(is_available=False)
        self._device = device
        self._formulas = FORMULAS if device.is_rocm else FORMULAS | ATTENTION_FORMULAS | RECURRENT_FORMULAS

    @contextmanager
    def measuring(
        self, func: Any, inputs: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Workspace]:
        """Runs a fake operator; its workspace follows from its arguments."""
        formula = self._formulas.get(func)
        if formula is None:
            yield Workspace((own_work_of(func, args).workspace_bytes,))
        else:
            yield Workspace(formula(self._device, args, kwargs))

    def in_order(self, func: Any, results: list[Tensor]) -> list[Tensor]:
        """Returns results in the order of allocation, in which dropout's mask is first: Dropout.cu, `dropout_cuda`."""
        return results[::-1] if func is _aten.native_dropout.default else in_order(func, results)


class FakeCudaWorkspaces(CudaWorkspaces):
    """Knows them for a step on fake tensors, in which operators can be taken to pieces as no kernel allows."""

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(device)
        self._formulas = self._formulas | PIECE_FORMULAS

    def in_pieces(self, func: Any) -> Callable[..., Any] | None:
        """Returns what runs an operator as several, where that is known."""
        return RECURRENT_PIECES.get(func)


def _embedding_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Sorts indices, and holds their segments and a float32 row per partial segment.

    Source: aten/src/ATen/native/cuda/Embedding.cu, `embedding_dense_backward_cuda`; EmbeddingBackwardKernel.cu.
    """
    grad, indices, num_weights, _, scales_by_frequency = args[:5]
    num_indices, width = indices.numel(), grad.shape[-1]
    copy = () if grad.is_contiguous() else (AheadOfResults(grad.numel() * grad.element_size()),)
    if num_indices <= _FEW_INDICES and not scales_by_frequency:
        return copy
    index_bytes = indices.element_size()
    num_segments = min(num_indices, num_weights)
    num_partial = num_indices // _ROWS_PER_THREAD + num_segments
    each = (num_indices * index_bytes,)
    sorting = (*each * 3, _sort_bytes(device, num_indices, index_bytes, num_weights))
    # The order of the indices, those in order, and where segments of equal ones begin; how often each is there.
    held = (*map(AheadOfResults, each * 2), *each * (2 if scales_by_frequency else 1))
    counts = (index_bytes,) * 2  # of segments, and of partial ones
    segments = (num_segments * index_bytes,) * 2 + (num_partial * index_bytes,)
    count = 0 if device.multiprocessors is None else device.multiprocessors.number
    if num_weights < _SEGMENTS_EACH * count and num_indices // _ROWS_PER_THREAD > _PARTIAL_EACH * num_segments:
        # Few long segments are added up in the result, in half precision first in a float32 one.
        sums: tuple[int, ...] = (
            num_partial * index_bytes,
            num_segments * width * _FLOAT_BYTES * (grad.element_size() < _FLOAT_BYTES),
        )
    else:
        sums = (num_partial * width * max(grad.element_size(), _FLOAT_BYTES),)
    adding = (*held, *counts, *segments, *sums)
    result_bytes = num_weights * width * grad.element_size()  # comes after the sorting
    return copy + (tuple(map(AheadOfResults, sorting)) if sum(sorting) > sum(adding) + result_bytes else adding)


def _sort_bytes(device: CudaDevice, num_keys: int, key_bytes: int, most: int) -> int:
    """Returns what CUB asks for to sort pairs of 64-bit numbers by keys up to `most`, 8 bits of them at a time.

    Source: NVIDIA/cccl, cub/cub/device/dispatch/dispatch_radix_sort.cuh, `InvokeOnesweep`: counters of digits by pass
    and by tile, and from the second pass on keys and values once more, rounded to 256 bytes.
    """
    num_passes = -(-most.bit_length() // 8)
    again = 2 * (-(-num_keys * key_bytes // 256) * 256) if num_passes > 1 else 0
    tile = _SORT_TILE[min(max(device.capability[0], 7), 9)]
    return 511 + 2048 * num_passes + 1024 * -(-num_keys // tile) + again


def _index_put(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Sorts positions to add up what falls on the same place: four numbers for each.

    Source: aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    indices, values = args[1], args[2]
    if not (len(args) > 3 and args[3]):  # only accumulation sorts
        return ()
    shapes = [index.shape for index in indices if index is not None and index.dtype != torch.bool]
    num_indices = int(torch.Size(torch.broadcast_shapes(*shapes)).numel()) if shapes else 0
    copy = () if values.is_contiguous() else (values.numel() * values.element_size(),)
    return *copy, *(_INDEX_BYTES * num_indices,) * 4


FORMULAS: dict[Any, Formula] = {
    **REDUCING_FORMULAS,
    **PRODUCT_FORMULAS,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.index_put.default: _index_put,
    _aten.index_put_.default: _index_put,
    operator_named("_index_put_impl_.default"): _index_put,
}
"""Functions by operator: called with its arguments, each returns the bytes of each block."""
