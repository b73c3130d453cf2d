"""Makes a step on fake CPU tensors run the functions that a CUDA device would run, while it is recorded.

What torch decides by the device of a tensor cannot be put right afterwards: an attention kernel or a dropout mask
changes which operators run and what they save. So for the time of a recording torch.nn.functional has the device's
choices in place of the CPU's, and autocast to CUDA is not silently off.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from memwall.patches import Patches
from memwall.predict.cuda.attention import run_attention
from memwall.predict.cuda.autocast_lists import HeardAutocast, cuda_autocast_lists
from memwall.predict.cuda.cuda_device import CudaDevice
from memwall.predict.cuda.recurrent import cuda_recurrent
from memwall.predict.cuda.recurrent_memory import RECURRENT_RESULTS
from memwall.predict.cuda.workspaces import FakeCudaWorkspaces
from memwall.torch_internals.dispatch import TorchDispatchMode
from memwall.torch_internals.operators import library_for_now


class CudaRecording:
    """Holds what `memwall.trace.fake.fake_run` needs to record for a device that is not here.

    Args:
        device: under ROCm, AOTriton stands in place of CUDA's attention kernels.
    """

    def __init__(self, device: CudaDevice) -> None:
        self.workspaces = FakeCudaWorkspaces(device)
        # Torch would switch it off without a device.
        self._autocast = HeardAutocast(of="cuda", on="cpu")
        self._device = device

    @property
    def autocast(self) -> Literal["none", "bfloat16", "float16"]:
        """Names the precision of the last autocast that was entered."""
        return self._autocast.precision

    @contextmanager
    def choices(self) -> Iterator[None]:
        """Has torch's functions choose as on the device, within."""
        with Patches("records a step for a device that is not here") as patches:
            self._autocast.follow(patches)
            if not self._device.is_rocm:
                patches.wrap(F, "scaled_dot_product_attention", self._attention)
                patches.enter("functions", "recurrent layers", cuda_recurrent())
            patches.wrap(F, "dropout", _fused_dropout)
            patches.enter("operators", "torch.ops.aten, autocast-lists", cuda_autocast_lists())
            patches.enter("operators", "torch.ops.aten, rms-norm", _whole_rms_norm())
            patches.enter("operators", "torch.ops.aten, results", cuda_results())
            yield

    def _attention(self, _: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        return run_attention(self._device.capability, *args, **kwargs)


def _fused_dropout(
    original: Callable[..., Tensor], input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Runs a dropout that saves a mask of bools, where Dropout.cpp's `is_fused_kernel_acceptable` holds on CUDA.

    That is so for 0 < p < 1. On a CPU the mask has the dtype of the input.
    """
    if inplace or not training or not 0 < p < 1 or input.numel() == 0:
        return original(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


@contextmanager
def _whole_rms_norm() -> Iterator[None]:
    """Keeps RMS norms of fake tensors on a CPU from being taken to pieces, within.

    `torch.rms_norm` calls an operator that CUDA has a kernel for and that a CPU takes to pieces; of those autograd
    saves a copy of the input and of the result in float32. With a kernel in the CPU's place the operator stays whole,
    and autograd saves what it does on CUDA: the input, the weight and one number per row. Fake tensors still find
    shapes by way of the pieces.

    Source: aten/src/ATen/native/layer_norm.cpp, `rms_norm_symint`; cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`;
    what is saved is what torch 2.13 saves of `_fused_rms_norm`.
    """

    def only_fake(*_: Any) -> Any:
        raise AssertionError("a step is recorded on fake tensors, which run no kernel")

    with library_for_now("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", only_fake, "CPU")
        yield


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
