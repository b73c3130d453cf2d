"""RMS norm as CUDA runs it: one operator, for tensors on a CPU that stand for CUDA's.

`torch.rms_norm` calls an operator that CUDA has a kernel for and that a CPU takes to pieces; of those autograd saves a
copy of the input and of the result in float32. With a kernel in the CPU's place the operator stays whole, and autograd
saves what it does on CUDA: the input, the weight and one number per row. Fake tensors still find shapes by way of the
pieces.

Source: aten/src/ATen/native/layer_norm.cpp, `rms_norm_symint`; cuda/layer_norm_kernel.cu, `_fused_rms_norm_cuda`; what
is saved is what torch 2.13 saves of `_fused_rms_norm`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memwall.torch_internals.operators import library_for_now


@contextmanager
def fused_rms_norm() -> Iterator[None]:
    """Keeps RMS norms of fake tensors on a CPU from being taken to pieces, within."""
    with library_for_now("aten", "IMPL") as library:
        library.impl("_fused_rms_norm", _only_fake, "CPU")
        yield


def _only_fake(*args: Any) -> Any:
    raise AssertionError("a step is recorded on fake tensors, which run no kernel")
