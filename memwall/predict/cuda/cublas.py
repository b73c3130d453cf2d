"""The workspaces that cuBLAS holds in torch's caching allocator from a thread's first product on."""

from collections.abc import Callable, Sequence
from itertools import product

import msgspec
import torch

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
