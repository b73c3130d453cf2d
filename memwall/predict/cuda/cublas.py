"""The workspaces that cuBLAS holds in torch's caching allocator from a thread's first product on, and what is copied
for it: matrices of which neither rows nor columns lie one behind the other, as an expanded one's do not.
"""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import msgspec
import torch
from torch import Tensor

from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.predict.cuda_allocator.torch_releases import profile_for
from memwall.trace.records import Op, Step, Storage

# A workspace for each thread that multiplies, which cuBLASLt shares: aten/src/ATen/cuda/CublasHandlePool.cpp,
# parseChosenWorkspaceSize and setWorkspaceForHandle; torch/backends/cuda/__init__.py, TORCH_CUBLASLT_UNIFIED_WORKSPACE.
# In torch 2.11 cuBLASLt, which adds a bias to a product, has one of its own, as an H100 held it.
_CUBLAS_BYTES = 4096 * 1024 * 2 + 16 * 1024 * 8
_CUBLAS_BYTES_NEW = 4096 * 8 * 1024
_ROCM_BYTES, _ROCM_BYTES_GFX94 = 32 << 20, 128 << 20
_OWN_LT_BYTES = 1 << 20
_WITH_BIAS = "aten.addmm.default"
_PRODUCTS = frozenset(
    f"aten.{name}.default" for name in ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "_grouped_mm")
)


def with_cublas_workspaces(step: Step, is_first: bool, names: Sequence[str], device: CudaDevice) -> Step:
    """Returns a step with a workspace for each thread that multiplies; autograd runs backward on CUDA in its own.

    Args:
        is_first: they come into being in this step; otherwise they are there before it.
    """
    num_ops = len(step.ops)
    place = next((s.device for s in step.storages if s.device_type == "cuda"), "cuda")
    workspaces: list[tuple[int, Callable[[Op], bool]]] = [
        (_cublas_bytes(device), lambda op: _takes_cublas(step, op, names[op.name]))
    ]
    if profile_for(str(torch.__version__))[0].version == "2.11" and not device.is_rocm:
        workspaces.append((_OWN_LT_BYTES, lambda op: names[op.name] == _WITH_BIAS))
    added = []
    for is_backward, (nbytes, takes) in product((False, True), workspaces):
        calls = (at for at, op in enumerate(step.ops) if (op.phase == "backward") == is_backward and takes(op))
        first = next(calls, None)
        if first is not None:
            added.append(
                Storage(
                    nbytes=nbytes,
                    device=place,
                    category="temporary",
                    birth=first if is_first else -1,
                    dropped=num_ops,
                    death=num_ops,
                    module=-1,
                    phase="other",
                    batched=False,
                )
            )
    return msgspec.structs.replace(step, storages=(*step.storages, *added))


def _takes_cublas(step: Step, op: Op, name: str) -> bool:
    """Tells whether an operation multiplies with cuBLAS; a batch of columns times rows takes none, as a matrix does.

    Source: what torch 2.13 allocates, with tests/predict/test_translate.py's cases.
    """
    if name not in _PRODUCTS:
        return False
    if name != "aten.bmm.default" or not op.outputs:
        return True
    result = step.storages[op.outputs[0]]
    return op.flops * getattr(torch, result.dtype, torch.float32).itemsize != 2 * result.nbytes


def _cublas_bytes(device: CudaDevice) -> int:
    major, _ = device.capability
    if device.is_rocm:
        return _ROCM_BYTES_GFX94 if major == 9 else _ROCM_BYTES
    return _CUBLAS_BYTES_NEW if major in (9, 10, 12) else _CUBLAS_BYTES


def _copies(args: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns the bytes of the copies of the two factors of a product.

    Source: aten/src/ATen/native/cuda/Blas.cpp, `prepare_matrix_for_cublas`, `prepare_batch_matrix_for_cublas`.
    """
    return tuple(factor.numel() * factor.element_size() for factor in args if _is_copied(factor))


def _is_copied(factor: Tensor) -> bool:
    (rows, columns), (row_stride, column_stride) = factor.shape[-2:], factor.stride()[-2:]
    lies_in_rows = column_stride == 1 and row_stride >= max(1, columns)
    lies_in_columns = row_stride == 1 and column_stride >= max(1, rows)
    if lies_in_rows or lies_in_columns:
        return False
    if factor.dim() == 2:
        return not (factor.is_contiguous() or factor.t().is_contiguous())
    return not (factor.is_contiguous() and row_stride and column_stride)


def _factors(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return _copies(args[:2])


def _added_factors(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    return _copies(args[1:3])


def _batches(device: CudaDevice, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns none of columns times rows, which are multiplied without cuBLAS (see `_takes_cublas`)."""
    return () if args[0].shape[-1] == 1 else _copies(args[:2])


_aten = torch.ops.aten
PRODUCT_FORMULAS: dict[Any, Callable[[CudaDevice, tuple[Any, ...], dict[str, Any]], tuple[int, ...]]] = {
    _aten.mm.default: _factors,
    _aten.addmm.default: _added_factors,
    _aten.bmm.default: _batches,
    _aten.baddbmm.default: _added_factors,
}
"""Functions as in `memwall.predict.cuda.workspaces.FORMULAS`."""
