"""Which operators of a training step reduce on a CUDA device, the types their kernels work in, and what they allocate.

A reduction may be inside another operator: that of a convolution's bias, of a loss, of the partial sums that a
normalisation's backward makes where there are many more rows than columns.

Source: aten/src/ATen/native/cuda/ReduceSumProdKernel.cu, ReduceMomentKernel.cu, ReduceNormKernel.cu,
ReduceAMinMaxKernel.cu, ReduceLogicKernel.cu; ReduceOps.cpp, `sum_out`, `mean_out`; Convolution.cpp,
`convolution_backward`; Loss.cpp, `mse_loss_out`; cuda/layer_norm_kernel.cu, `LayerNormBackwardKernelImplInternal`;
cuda/group_norm_kernel.cu. Compared with what torch 2.13 allocates (tests/golden/cuda_operator_blocks.json).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.predict.cuda.reductions import ReductionKernel, reduction_blocks
from memwall.torch_internals.operators import operator_named
from memwall.trace.workspaces import AheadOfResults

_aten = torch.ops.aten
_FLOAT_BYTES = 4
_HALVES = (torch.float16, torch.bfloat16)
# layer_norm_kernel.cu: rows from which partial sums are worth a second kernel, rows and columns of its blocks of
# threads, and the most partial sums.
_MANY_ROWS, _TILE, _MOST_PARTIAL_SUMS = 64 * 1024, 32, 1024 * 1024


def _blocks(device: CudaDevice, tensor: Tensor, dims: Sequence[int], kernel: ReductionKernel) -> tuple[int, ...]:
    if device.multiprocessors is None:
        return ()
    return reduction_blocks(
        device.multiprocessors, kernel, tensor.shape, tensor.stride(), dims, offset=int(tensor.storage_offset())
    )


def _dims(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if dims is None:
        return ()
    return (dims,) if isinstance(dims, int) else tuple(dims)


def _sum(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts `sum.dim_IntList` and `mean.dim`, which compute in float32 what comes in half precision."""
    dtype = args[3] if len(args) > 3 else kwargs.get("dtype")
    return _added(device, args[0], _dims(args, kwargs), dtype)


def _sum_of_all(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return _added(device, args[0], (), kwargs.get("dtype"))


def _added(device: CudaDevice, tensor: Tensor, dims: Sequence[int], dtype: torch.dtype | None) -> tuple[int, ...]:
    """Counts a sum; integers, and what is summed in a dtype of its own, are converted first, into a copy."""
    if dtype is None:
        dtype = tensor.dtype if tensor.dtype.is_floating_point or tensor.dtype.is_complex else torch.int64
    loads_halves = tensor.dtype in _HALVES and dtype in (*_HALVES, torch.float32)
    if loads_halves or dtype == tensor.dtype:
        return _blocks(device, tensor, dims, _summing(tensor.dtype, dtype))
    copy = torch.empty_like(tensor, dtype=dtype, device="meta")
    return copy.nbytes, *_blocks(device, copy, dims, _summing(dtype, dtype))


def _summing(dtype: torch.dtype, result: torch.dtype) -> ReductionKernel:
    is_half = dtype in _HALVES
    return ReductionKernel(
        dtype.itemsize,
        max(dtype.itemsize, _FLOAT_BYTES),
        vector=8 if is_half else 4,
        sums_in_result=not is_half or result == torch.float32,
    )


def _norm(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    tensor, dims = args[0], args[2] if len(args) > 2 else kwargs.get("dim")
    kernel = _summing(tensor.dtype, tensor.dtype)._replace(vector=4)
    return _blocks(device, tensor, dims or (), kernel)


def _largest(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts `amax` and `amin`, whose partial results are of the input's dtype."""
    tensor = args[0]
    return _blocks(device, tensor, _dims(args, kwargs), ReductionKernel(tensor.element_size(), tensor.element_size()))


def _variance(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts mean, squares and two counts for each partial result."""
    tensor = args[0]
    partial_bytes = 32 if tensor.dtype == torch.float64 else 16
    kernel = ReductionKernel(tensor.element_size(), partial_bytes, vector=2, sums_in_result=False)
    return _blocks(device, tensor, _dims(args, kwargs), kernel)


def _any(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return _blocks(device, args[0], _dims(args, kwargs), ReductionKernel(args[0].element_size(), 1))


def _mse_loss(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts the squares, which a reduced loss has beside its own memory, and their mean."""
    reduction = args[2] if len(args) > 2 else kwargs.get("reduction", 1)
    if reduction == 0:
        return ()
    squares = torch.empty_like(args[0], device="meta")
    return squares.nbytes, *_added(device, squares, (), None)


def _convolution_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts the sum that a bias's gradient is; what cuDNN asks for besides is not known."""
    gradient, mask = args[0], args[10] if len(args) > 10 else kwargs["output_mask"]
    if not mask[2]:
        return ()
    return _added(device, gradient, [dim for dim in range(gradient.dim()) if dim != 1], None)


# -- normalisation -----------------------------------------------------------------------------------------------------


def _layer_norm(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts a copy of what does not lie in memory row by row, as what a convolution returns, transposed."""
    return _copied(args[0])


def _layer_norm_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    gradient, tensor, shape, mask = args[0], args[1], args[2], args[7]
    return _copied(tensor) + _copy(gradient) + _partial_sums(device, tensor, shape, sum(map(bool, mask[1:])))


def _rms_norm_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    gradient, tensor, shape, mask = args[0], args[1], args[2], args[5]
    return _copied(tensor) + _copy(gradient) + _partial_sums(device, tensor, shape, int(bool(mask[1])))


def _partial_sums(device: CudaDevice, tensor: Tensor, shape: Sequence[int], num_gradients: int) -> tuple[int, ...]:
    """Counts a partial sum per tile of rows and column for weight and bias each, their sums and what these take."""
    columns = int(torch.Size(shape).numel())
    rows = tensor.numel() // columns if columns else 0
    multiprocessors = device.multiprocessors
    if multiprocessors is None or not num_gradients or rows <= _MANY_ROWS:
        return ()
    if columns // _TILE >= multiprocessors.number // 2:
        return ()
    num_tiles = min(-(-rows // _TILE), _MOST_PARTIAL_SUMS // (-(-columns // _TILE) * _TILE))
    partial = torch.empty(num_tiles, columns, dtype=tensor.dtype, device="meta")
    sums = columns * tensor.element_size()
    return *(partial.nbytes for _ in range(num_gradients)), sums, *_added(device, partial, (0,), None)


def _group_norm(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts scale and shift per sample and channel; in half precision also statistics per group, in float32."""
    samples, channels, area, groups = args[3:7]
    blocks = (_FLOAT_BYTES * samples * groups,) * 2 if args[0].dtype in _HALVES else ()
    has_weight = args[1] is not None or args[2] is not None
    return blocks + ((_accumulated(args[0]) * samples * channels,) * 2 if area > 1 and has_weight else ())


def _group_norm_backward(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Counts two sums per sample and channel, and three factors per group or channel."""
    gradient, tensor, weight = args[0], args[1], args[4]
    samples, channels, area, groups = args[5:9]
    size = _accumulated(tensor)
    factors = () if area == 1 or weight is None else (size * samples * channels,)
    return _copy(gradient) + (size * samples * channels,) * 2 + (size * samples * groups,) * 2 + factors


def _accumulated(tensor: Tensor) -> int:
    return max(_FLOAT_BYTES, tensor.element_size())


def _copy(tensor: Tensor) -> tuple[int, ...]:
    return () if tensor.is_contiguous() else (tensor.numel() * tensor.element_size(),)


def _copied(tensor: Tensor) -> tuple[int, ...]:
    """Counts a copy that is made ahead of the results."""
    return tuple(map(AheadOfResults, _copy(tensor)))


REDUCING_FORMULAS: dict[Any, Callable[[CudaDevice, tuple[Any, ...], dict[str, Any]], tuple[int, ...]]] = {
    _aten.sum.dim_IntList: _sum,
    _aten.sum.default: _sum_of_all,
    _aten.mean.dim: _sum,
    _aten.mean.default: _sum_of_all,
    _aten.linalg_vector_norm.default: _norm,
    _aten.amax.default: _largest,
    _aten.amin.default: _largest,
    _aten.var.correction: _variance,
    _aten.var_mean.correction: _variance,
    _aten.std.correction: _variance,
    _aten.std_mean.correction: _variance,
    _aten.any.default: _any,
    _aten.any.dim: _any,
    _aten.any.dims: _any,
    _aten.all.default: _any,
    _aten.all.dim: _any,
    _aten.all.dims: _any,
    _aten.mse_loss.default: _mse_loss,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_layer_norm_backward.default: _layer_norm_backward,
    operator_named("_fused_rms_norm_backward.default"): _rms_norm_backward,
    _aten.native_group_norm.default: _group_norm,
    _aten.native_group_norm_backward.default: _group_norm_backward,
}
"""Functions by operator: called with its arguments, each returns the bytes of each block."""
