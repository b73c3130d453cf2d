"""Autocast's lists of operators as CUDA has them, for tensors on a CPU that stand for CUDA's.

Both devices cast for products and convolutions; CUDA besides computes powers, norms, softmax and sums in float32, whose
results autograd then saves twice as large. A build of torch for CPUs knows CUDA's lists, too: which operators are on
them alone is asked of its dispatcher.

Source: aten/src/ATen/autocast_mode.h, AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE (torch 2.13 wheel).
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from memwall.patches import Patches
from memwall.torch_internals.operators import has_kernel, library_for_now, without_cpu_autocast
from memwall.torch_internals.trees import tree_map_only

_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh"),
    *("tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm"),
    *("rms_norm", "group_norm", "frobenius_norm.dim", "cosine_similarity", "dist", "pdist", "renorm", "logsumexp"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d"),
    *("upsample_trilinear3d", "upsample_bicubic2d"),
)
_FLOAT32_RESULT = ("cumsum", "cumprod", "sum", "sum.dim_IntList", "linalg_vector_norm")
# Fused with the cast on CUDA for float16, so that there is no copy of the input: SoftMax.cpp, `softmax`.
_FUSED_CAST = {"softmax.int": "_softmax", "log_softmax.int": "_log_softmax"}
# On the CPU's lists alone. On CUDA they run in the types that they are given, and kernels that join tensors of several
# read each where it is: Shape.cu, `cat_out_cuda`. What a loss consists of is on the lists.
_CPU_ONLY = (
    *("cross_entropy_loss", "cat", "stack", "index_copy", "avg_pool3d", "adaptive_avg_pool3d", "max_pool3d"),
    *("adaptive_max_pool3d", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    *("replication_pad3d", "grid_sampler_2d", "grid_sampler_3d"),
)


@contextmanager
def cuda_autocast_lists() -> Iterator[None]:
    """Has autocast on a CPU treat the operators on CUDA's lists as CUDA does, within."""
    with library_for_now("aten", "IMPL") as library:
        for name in _FLOAT32:
            _register(library, name, _in_float32)
        for name in _FLOAT32_RESULT:
            _register(library, name, _with_float32_result)
        for name in _FUSED_CAST:
            _register(library, name, _fused)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns of every kernel that takes another's place
            for name in _CPU_ONLY:
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU", allow_override=True)
        yield


def _register(library: Any, name: str, make: Callable[[str], Callable[..., Any]]) -> None:
    """Registers a kernel for an operator that is on CUDA's lists and on none of the CPU's."""
    if has_kernel(f"aten::{name}", "AutocastCUDA") and not has_kernel(f"aten::{name}", "AutocastCPU"):
        library.impl(name, make(name), "AutocastCPU")


def _operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def without_autocast() -> Any:
    """Makes a context within which autocast, if it is on, casts nothing: where a kernel of its own has cast already."""
    return without_cpu_autocast()


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64


def _in_float32(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(torch.float32) if _is_castable(tensor) else tensor

        with without_autocast():
            return operator(*tree_map_only(Tensor, cast, args), **tree_map_only(Tensor, cast, kwargs))

    return kernel


def _with_float32_result(name: str) -> Callable[..., Any]:
    operator = _operator(name)

    def kernel(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is None and _is_castable(args[0]):
            dtype = torch.float32
        with without_autocast():
            return operator(*args, dtype=dtype, **kwargs)

    return kernel


def _fused(name: str) -> Callable[..., Any]:
    operator, fused = _operator(name), _operator(_FUSED_CAST[name])

    def kernel(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        with without_autocast():
            if dtype is None and tensor.dtype == torch.float16:
                return fused(tensor, dim, True)
            return operator(tensor, dim, torch.float32 if dtype is None and _is_castable(tensor) else dtype)

    return kernel


class HeardAutocast:
    """Has every autocast that a step enters for one device type run on the one that its tensors are on.

    Args:
        of: device type that the step was written for.
        on: device type of its tensors.
    """

    def __init__(self, *, of: str, on: str) -> None:
        self.precision: Literal["none", "bfloat16", "float16"] = "none"
        """Names that of the last autocast that was entered."""
        self._of, self._on = of, on

    def follow(self, patches: Patches) -> None:
        """Begins, until the patches are undone."""
        patches.wrap(torch.autocast, "__init__", self._begin)

    def _begin(
        self,
        init: Callable[..., None],
        autocast: Any,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        if device_type == self._of:
            device_type, dtype = self._on, torch.get_autocast_dtype(self._of) if dtype is None else dtype
        init(autocast, device_type, dtype, enabled, cache_enabled)
        if enabled:
            self.precision = "float16" if autocast.fast_dtype == torch.float16 else "bfloat16"
