"""Results of operators to which a CUDA device gives other dtypes than a CPU: one rule per operator, with its source."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from memwall.predict.cuda.recurrent_memory import RECURRENT_RESULTS
from memwall.torch_internals.dispatch import TorchDispatchMode

_aten = torch.ops.aten


class _CudaResults(TorchDispatchMode):
    """Lies below whatever records a step, so that this sees what is returned here."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        whole = RECURRENT_RESULTS.get(func)
        if whole is not None:
            return whole(*args)
        out = func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        return out if rule is None else rule(out)


def cuda_results() -> AbstractContextManager[object]:
    """Returns a context in which fake operators on a CPU return what CUDA's kernels return."""
    mode: AbstractContextManager[object] = _CudaResults()  # type: ignore[no-untyped-call]
    return mode


def _with_float32_statistics(out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns a norm's mean and deviation in the dtype that they are computed in.

    Source: aten/src/ATen/native/cuda/layer_norm_kernel.cu, `layer_norm_cuda`: `acc_type`; Normalization.cu,
    `batch_norm_cuda`: `toAccumulateType`. On a CPU they have the dtype of the input.
    """
    normed, mean, deviation = out
    if normed.dtype not in (torch.float16, torch.bfloat16):
        return out
    return normed, mean.to(torch.float32), deviation.to(torch.float32)


_RULES: dict[Any, Callable[[Any], Any]] = {
    _aten.native_layer_norm.default: _with_float32_statistics,
    _aten.native_batch_norm.default: _with_float32_statistics,
}
