"""The GPU's branch of the chunk loop on meta tensors: calls that exist, dtypes that fit, bytes as the cost says.

The row kernel is left out; test_interpreter.py has that.
"""

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memwall.triton_kernels.linear_cross_entropy import _chunks as chunks
from memwall.triton_kernels.linear_cross_entropy._chunks import LossCall
from memwall.triton_kernels.linear_cross_entropy._cost import scratch_bytes
from memwall.triton_kernels.linear_cross_entropy._ops import sum_op


class Meter(TorchDispatchMode):
    """Live bytes of whatever is allocated inside, and matmuls by the dtype of their result."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.seen: set[int] = set()
        self.matmuls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {id(t.untyped_storage()) for t in (*args, *(kwargs or {}).values()) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm"):
            self.matmuls.append((str(func), result.dtype))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in inputs | self.seen:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        self.seen.add(key)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.live_bytes -= size


def _takes_another_dtype() -> bool:
    matrix = torch.empty(2, 2, dtype=torch.bfloat16, device="meta")
    try:
        torch.addmm(matrix.float(), matrix, matrix, out_dtype=torch.float32)
    except TypeError:
        return False
    return True


needs_another_dtype = pytest.mark.skipif(
    not _takes_another_dtype(),
    reason="on the meta device addmm of torch 2.11 fails where its result has another dtype than the factors",
)


@pytest.fixture
def device_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "half_for", lambda *names: lambda *args, **kwargs: None)
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: nullcontext())


def a_call(dtype: torch.dtype, chunk_rows: int, *, want_w: bool, has_bias: bool = False) -> LossCall:
    x = torch.empty(4096, 512, dtype=dtype, device="meta")
    w = torch.empty(32_000, 512, dtype=dtype, device="meta")
    target = torch.empty(4096, dtype=torch.int64, device="meta")
    bias = torch.empty(32_000, dtype=dtype, device="meta") if has_bias else None
    return LossCall(x, w, target, bias, -100, 0.0, 0.0, 1.0, chunk_rows, True, want_w, has_bias)


def forward(call: LossCall) -> Meter:
    with Meter() as meter:
        kept = sum_op._init_fn(*call)
    del kept
    return meter


@pytest.mark.parametrize(
    "dtype",
    [*(pytest.param(half, marks=needs_another_dtype) for half in (torch.bfloat16, torch.float16)), torch.float32],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_head_is_summed_in_fp32(device_branch: None, dtype: torch.dtype, has_bias: bool) -> None:
    meter = forward(a_call(dtype, 1024, want_w=True, has_bias=has_bias))
    assert len(meter.matmuls) == 3 * 4
    assert sum(found == torch.float32 for _, found in meter.matmuls) == (12 if dtype == torch.float32 else 4)


@pytest.mark.parametrize("want_w", [False, pytest.param(True, marks=needs_another_dtype)])
@pytest.mark.parametrize("chunk_rows", [512, 2048])
def test_peak_is_the_scratch_and_the_gradients(device_branch: None, want_w: bool, chunk_rows: int) -> None:
    call = a_call(torch.bfloat16, chunk_rows, want_w=want_w)
    gradient_bytes = 4096 * 512 * 2 + (32_000 * 512 * 4 if want_w else 0)
    assert scratch_bytes(call) + gradient_bytes == pytest.approx(forward(call).peak_bytes, rel=0.02)
